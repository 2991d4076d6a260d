//! How the parts of a server learn that it ends.

use tokio::sync::watch;

/// Held by the server: when it is dropped, whatever still runs is cut off.
pub(crate) struct End(watch::Sender<bool>);

/// Held by everything that runs.
#[derive(Clone)]
pub(crate) struct Ending(watch::Receiver<bool>);

impl End {
    pub(crate) fn new() -> (Self, Ending) {
        let (sender, receiver) = watch::channel(false);
        (Self(sender), Ending(receiver))
    }

    /// Tells all to come to an end.
    pub(crate) fn begin(&self) {
        self.0.send_replace(true);
    }
}

impl Ending {
    /// Until it is time to come to an end.
    pub(crate) async fn begun(&mut self) {
        // An error means that it is over already.
        let _ = self.0.wait_for(|begun| *begun).await;
    }

    /// Until it is time to stop in the middle.
    pub(crate) async fn over(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}
