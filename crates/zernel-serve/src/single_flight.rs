//! Runs a piece of work once for all callers that wait for it at the same time.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;

/// Deduplicates concurrent work by key.
///
/// A caller that asks for a key already in flight waits for that result. The work continues even if
/// every caller is dropped.
pub(crate) struct SingleFlight<K, V> {
    in_flight: Arc<Mutex<InFlight<K, V>>>,
    /// One permit for each thread that may work at a time.
    threads: Arc<Semaphore>,
}

type InFlight<K, V> = HashMap<K, watch::Receiver<Option<V>>>;

/// The work panicked, so there is no result.
#[derive(Debug)]
pub(crate) struct WorkPanicked;

impl<K, V> SingleFlight<K, V>
where
    K: Clone + Eq + Hash + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// Creates a group of shared work that uses at most this number of threads at a time.
    pub(crate) fn new(threads: usize) -> Self {
        Self {
            in_flight: Arc::default(),
            threads: Arc::new(Semaphore::new(threads)),
        }
    }

    /// Returns the result of the work in flight for `key`, or starts `work` on a blocking thread.
    pub(crate) async fn run_or_join(
        &self,
        key: K,
        work: impl FnOnce() -> V + Send + 'static,
    ) -> Result<V, WorkPanicked> {
        let mut result = self.join_or_start_work(key, work);
        let result = result.wait_for(Option::is_some).await;
        result
            .ok()
            .and_then(|value| value.clone())
            .ok_or(WorkPanicked)
    }

    fn join_or_start_work(
        &self,
        key: K,
        work: impl FnOnce() -> V + Send + 'static,
    ) -> watch::Receiver<Option<V>> {
        let mut in_flight = lock_in_flight(&self.in_flight);
        if let Some(pending) = in_flight.get(&key) {
            return pending.clone();
        }
        let (sender, receiver) = watch::channel(None);
        in_flight.insert(key.clone(), receiver.clone());
        let entry = RemoveKeyOnDrop(Arc::clone(&self.in_flight), key);
        let threads = Arc::clone(&self.threads);
        tokio::spawn(async move {
            // Acquiring fails only if the semaphore is closed. It never is.
            let _permit = threads.acquire_owned().await;
            // A panic drops the sender, which is how callers notice.
            let _ = spawn_blocking(move || {
                let value = work();
                // Remove the entry before publishing: a later caller must get a newer result.
                drop(entry);
                sender.send_replace(Some(value));
            })
            .await;
        });
        receiver
    }
}

/// Removes the entry of a key when this value is dropped, so also when the work panics.
struct RemoveKeyOnDrop<K: Eq + Hash, V>(Arc<Mutex<InFlight<K, V>>>, K);

impl<K: Eq + Hash, V> Drop for RemoveKeyOnDrop<K, V> {
    fn drop(&mut self) {
        lock_in_flight(&self.0).remove(&self.1);
    }
}

/// Locks the mutex even if it is poisoned: the map operations under it cannot leave it half
/// changed.
fn lock_in_flight<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn concurrent_callers_share_one_result_and_later_callers_get_a_new_one() {
        let single_flight = SingleFlight::new(1);
        let calls = Arc::new(AtomicU32::new(0));
        let (go, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let request = || {
            let (calls, gate) = (Arc::clone(&calls), Arc::clone(&gate));
            single_flight.run_or_join("key", move || {
                gate.lock().unwrap().recv().unwrap();
                calls.fetch_add(1, Ordering::SeqCst) + 1
            })
        };
        let release = async { go.send(()).unwrap() };
        let (first, second, ()) = tokio::join!(request(), request(), release);
        assert_eq!((first.unwrap(), second.unwrap()), (1, 1));
        go.send(()).unwrap();
        assert_eq!(request().await.unwrap(), 2);
    }

    #[tokio::test]
    async fn work_of_one_kind_does_not_wait_for_threads_of_another() {
        let (slow, quick) = (SingleFlight::new(1), SingleFlight::new(1));
        let (go, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let wait = |key: u32| {
            let gate = Arc::clone(&gate);
            slow.run_or_join(key, move || gate.lock().unwrap().recv().unwrap())
        };
        let after = async {
            assert_eq!(quick.run_or_join((), || 1).await.unwrap(), 1);
            go.send(()).unwrap();
            go.send(()).unwrap();
        };
        let (first, second, ()) = tokio::join!(wait(1), wait(2), after);
        assert!(first.is_ok() && second.is_ok());
    }

    #[tokio::test]
    async fn work_continues_when_its_first_caller_is_dropped() {
        let single_flight = SingleFlight::new(1);
        let (go, gate) = mpsc::channel::<()>();
        let first = single_flight.run_or_join((), move || {
            gate.recv().unwrap();
            1
        });
        let mut first = Box::pin(first);
        tokio::select! {
            biased;
            _ = &mut first => unreachable!("the work is still waiting"),
            () = std::future::ready(()) => drop(first),
        }
        let (second, ()) = tokio::join!(single_flight.run_or_join((), || 2), async {
            go.send(()).unwrap();
        });
        assert_eq!(second.unwrap(), 1);
    }

    #[tokio::test]
    async fn a_panic_is_reported_once_and_the_next_call_runs_again() {
        let single_flight = SingleFlight::new(1);
        assert!(
            single_flight
                .run_or_join((), || panic!("on purpose"))
                .await
                .is_err()
        );
        assert_eq!(single_flight.run_or_join((), || 1).await.unwrap(), 1);
    }
}
