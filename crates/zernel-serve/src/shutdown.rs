//! The shutdown signal that all tasks of a server wait for.

use tokio::sync::watch;

/// Requests shutdown. Dropping the trigger ends the grace period.
pub(crate) struct ShutdownTrigger(watch::Sender<bool>);

/// Receives the shutdown request and the end of the grace period.
#[derive(Clone)]
pub(crate) struct ShutdownSignal(watch::Receiver<bool>);

impl ShutdownTrigger {
    pub(crate) fn new() -> (Self, ShutdownSignal) {
        let (sender, receiver) = watch::channel(false);
        (Self(sender), ShutdownSignal(receiver))
    }

    /// Starts the shutdown.
    pub(crate) fn request_shutdown(&self) {
        self.0.send_replace(true);
    }
}

impl ShutdownSignal {
    /// Waits until shutdown is requested.
    pub(crate) async fn wait_until_requested(&mut self) {
        // The trigger may be dropped already, which also means shutdown.
        let _ = self.0.wait_for(|requested| *requested).await;
    }

    /// Waits until the grace period is over, when unfinished work is abandoned.
    pub(crate) async fn wait_until_grace_is_over(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}
