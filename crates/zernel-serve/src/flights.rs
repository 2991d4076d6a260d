//! Work that is done once for all who want it at the same time.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio::task::spawn_blocking;

/// The work under way, by what it is for. Who asks for the same joins it, so each thing is worked
/// on at most once at a time, however many ask and whoever of them goes away.
pub(crate) struct Flights<K, V>(Arc<Mutex<Open<K, V>>>);

type Open<K, V> = HashMap<K, watch::Receiver<Option<V>>>;

/// The work panicked.
#[derive(Debug)]
pub(crate) struct Crashed;

impl<K, V> Default for Flights<K, V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K, V> Flights<K, V>
where
    K: Clone + Eq + Hash + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// The result of the work for `key`: of what is under way, else of `work`, on a thread that may
    /// block.
    pub(crate) async fn join(
        &self,
        key: K,
        work: impl FnOnce() -> V + Send + 'static,
    ) -> Result<V, Crashed> {
        let mut result = self.find_or_start(key, work);
        let result = result.wait_for(Option::is_some).await;
        result.ok().and_then(|value| value.clone()).ok_or(Crashed)
    }

    fn find_or_start(
        &self,
        key: K,
        work: impl FnOnce() -> V + Send + 'static,
    ) -> watch::Receiver<Option<V>> {
        let mut open = lock(&self.0);
        if let Some(flight) = open.get(&key) {
            return flight.clone();
        }
        let (sender, receiver) = watch::channel(None);
        open.insert(key.clone(), receiver.clone());
        let landing = Landing(Arc::clone(&self.0), key);
        spawn_blocking(move || {
            let value = work();
            // Who asks from now on wants newer news.
            drop(landing);
            sender.send_replace(Some(value));
        });
        receiver
    }
}

/// Takes a flight off the list, also when its work panics.
struct Landing<K: Eq + Hash, V>(Arc<Mutex<Open<K, V>>>, K);

impl<K: Eq + Hash, V> Drop for Landing<K, V> {
    fn drop(&mut self) {
        lock(&self.0).remove(&self.1);
    }
}

/// No panic can leave the list half changed, so a poisoned lock is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn who_asks_meanwhile_gets_the_same_and_who_asks_later_gets_newer() {
        let flights = Flights::default();
        let calls = Arc::new(AtomicU32::new(0));
        let (go, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let ask = || {
            let (calls, gate) = (Arc::clone(&calls), Arc::clone(&gate));
            flights.join("key", move || {
                gate.lock().unwrap().recv().unwrap();
                calls.fetch_add(1, Ordering::SeqCst) + 1
            })
        };
        let release = async { go.send(()).unwrap() };
        let (first, second, ()) = tokio::join!(ask(), ask(), release);
        assert_eq!((first.unwrap(), second.unwrap()), (1, 1));
        go.send(()).unwrap();
        assert_eq!(ask().await.unwrap(), 2);
    }

    #[tokio::test]
    async fn work_goes_on_when_who_asked_for_it_goes_away() {
        let flights = Flights::default();
        let (go, gate) = mpsc::channel::<()>();
        let first = flights.join((), move || {
            gate.recv().unwrap();
            1
        });
        let mut first = Box::pin(first);
        tokio::select! {
            biased;
            _ = &mut first => unreachable!("the gate is shut"),
            () = std::future::ready(()) => drop(first),
        }
        let (second, ()) = tokio::join!(flights.join((), || 2), async { go.send(()).unwrap() });
        assert_eq!(second.unwrap(), 1);
    }

    #[tokio::test]
    async fn a_panic_is_an_error_once() {
        let flights = Flights::default();
        assert!(flights.join((), || panic!("on purpose")).await.is_err());
        assert_eq!(flights.join((), || 1).await.unwrap(), 1);
    }
}
