//! The heartbeat of the scheduler as a reader of task states.

use libbpf_rs::{MapCore, MapFlags, MapMut};
use zernel_phase::shared::{HEART_READER, Heartbeat, layout_hash};
use zerocopy::IntoBytes;

use crate::loaded_scheduler::monotonic_ns;

/// The heartbeat of a scheduler that reads the pinned maps. While it beats, an observer that stops leaves the maps in place. The next observer then writes the maps that
/// this scheduler reads, because a loaded scheduler cannot change to others.
pub(crate) struct ReaderHeartbeat<'a> {
    heartbeats_map: &'a MapMut<'a>,
    since_ns: u64,
}

impl<'a> ReaderHeartbeat<'a> {
    /// Beats for the first time.
    pub(crate) fn start(heartbeats_map: &'a MapMut<'a>) -> Self {
        let reader = Self {
            heartbeats_map,
            since_ns: monotonic_ns(),
        };
        reader.record_heartbeat();
        reader
    }

    /// Beats. Without a beat for a second, the reader counts as dead.
    pub(crate) fn record_heartbeat(&self) {
        self.write_heartbeat_at(monotonic_ns());
    }

    fn write_heartbeat_at(&self, last_beat_ns: u64) {
        let heartbeat = Heartbeat {
            last_beat_ns,
            owner_pid: std::process::id(),
            layout_hash: layout_hash(),
            since_ns: self.since_ns,
        };
        let key = HEART_READER.to_ne_bytes();
        // An update of an element of an array does not fail.
        let _ = self
            .heartbeats_map
            .update(&key, heartbeat.as_bytes(), MapFlags::ANY);
    }
}

impl Drop for ReaderHeartbeat<'_> {
    fn drop(&mut self) {
        self.write_heartbeat_at(0);
    }
}
