//! How the parts of a server learn that it ends.

use tokio::sync::watch;

/// Held by the server: when it is dropped, whatever still runs is cut off.
pub(crate) struct ShutdownTrigger(watch::Sender<bool>);

/// Held by everything that runs.
#[derive(Clone)]
pub(crate) struct ShutdownSignal(watch::Receiver<bool>);

impl ShutdownTrigger {
    pub(crate) fn new() -> (Self, ShutdownSignal) {
        let (sender, receiver) = watch::channel(false);
        (Self(sender), ShutdownSignal(receiver))
    }

    /// Tells all to come to an end.
    pub(crate) fn request(&self) {
        self.0.send_replace(true);
    }
}

impl ShutdownSignal {
    /// Until it is time to come to an end.
    pub(crate) async fn requested(&mut self) {
        // An error means that it is over already.
        let _ = self.0.wait_for(|requested| *requested).await;
    }

    /// Until it is time to stop in the middle.
    pub(crate) async fn grace_over(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}
