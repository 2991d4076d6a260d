//! The heartbeat of an observer: shows readers of the task states that the probes still write them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use zernel_phase::shared::{HEART_OBSERVER, HEART_READER, Heartbeat, layout_hash};

use super::mapped_array::MappedArray;
use super::monotonic_ns;

/// Time between two beats of the observer's heart. A scheduler takes an observer for dead after five intervals without a beat.
const BEAT_INTERVAL: Duration = Duration::from_millis(200);

/// Beats on its own thread until it is dropped, because a round of the observer may take longer than a beat.
#[derive(Debug)]
pub(super) struct ObserverHeart {
    hearts: Arc<MappedArray<Heartbeat>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ObserverHeart {
    /// The first beat is written before `start` returns.
    pub(super) fn start(hearts: MappedArray<Heartbeat>) -> io::Result<Self> {
        let hearts = Arc::new(hearts);
        let stop = Arc::new(AtomicBool::new(false));
        let since_ns = monotonic_ns();
        write_beat(&hearts, since_ns);
        let (own_hearts, own_stop) = (Arc::clone(&hearts), Arc::clone(&stop));
        let beats = move || {
            while !own_stop.load(Ordering::Relaxed) {
                write_beat(&own_hearts, since_ns);
                thread::park_timeout(BEAT_INTERVAL);
            }
        };
        let thread = thread::Builder::new()
            .name("zernel-heart".into())
            .spawn(beats)?;
        Ok(Self {
            hearts,
            stop,
            thread: Some(thread),
        })
    }

    /// Whether a process reads the task states.
    pub(super) fn has_reader(&self) -> bool {
        let reader = self.hearts.read(HEART_READER as usize);
        reader.is_alive(monotonic_ns())
    }
}

impl Drop for ObserverHeart {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
        write_heartbeat(&self.hearts, 0, 0);
    }
}

fn write_beat(hearts: &MappedArray<Heartbeat>, since_ns: u64) {
    write_heartbeat(hearts, monotonic_ns(), since_ns);
}

fn write_heartbeat(hearts: &MappedArray<Heartbeat>, last_beat_ns: u64, since_ns: u64) {
    let heartbeat = Heartbeat {
        last_beat_ns,
        owner_pid: std::process::id(),
        layout_hash: layout_hash(),
        since_ns,
    };
    hearts.write(HEART_OBSERVER as usize, &heartbeat);
}
