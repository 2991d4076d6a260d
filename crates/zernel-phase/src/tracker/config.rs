//! The time limits of the event rule.

use std::mem::offset_of;

use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::mirror::StructMirror;
use crate::phase_detector::ConfigError;

/// Declares [`TrackerConfig`] from one list: documentation, name and default of every limit.
macro_rules! tracker_config {
    ($($(#[$doc:meta])* $limit:ident = $default:expr,)*) => {
        /// Time limits of the event rule: how long a phase lasts without further evidence. The kernel reads it as
        /// `struct zernel_tracker_config`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[serde(default, deny_unknown_fields)]
        #[repr(C)]
        pub struct TrackerConfig {
            $($(#[$doc])* pub $limit: u64,)*
        }

        impl Default for TrackerConfig {
            fn default() -> Self {
                Self { $($limit: $default,)* }
            }
        }

        impl TrackerConfig {
            pub(crate) const MIRROR: StructMirror = StructMirror {
                c_name: "zernel_tracker_config",
                size: size_of::<Self>(),
                fields: &[$((stringify!($limit), offset_of!(Self, $limit)),)*],
            };

            fn limits(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($limit), self.$limit),)*].into_iter()
            }
        }
    };
}

tracker_config! {
    /// Limit for a GPU sync without leave event. Long, because a sync may spin.
    sync_max_ns = 60_000_000_000,
    /// Limit for a collective without leave event. Short, because the call only enqueues work.
    collective_max_ns = 1_000_000_000,
    /// Limit for a blocked thread, in any phase.
    blocked_max_ns = Self::MAX_NS,
    /// Limit for data loading after its last event.
    loading_max_ns = 10_000_000_000,
    /// Limit for GPU compute after the last launch, copy or sync, and for other work after it was announced. Long,
    /// because launches may be sampled and the first steps load libraries.
    launching_max_ns = 1_000_000_000,
    /// Limit for an optimizer step after it was announced, or after its last marker.
    optimizer_max_ns = 1_000_000_000,
    /// A launch within this time after a marker belongs to the optimizer step.
    optimizer_launch_max_ns = 1_000_000,
    /// A shorter wait does not end the current activity.
    short_wait_max_ns = 1_000_000,
}

impl TrackerConfig {
    /// Largest allowed limit: one hour.
    pub const MAX_NS: u64 = 3_600_000_000_000;

    /// Returns an error if a limit is zero or above [`MAX_NS`](Self::MAX_NS).
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (limit, ns) in self.limits() {
            if ns == 0 || ns > Self::MAX_NS {
                let allowed = format!("from 1 to {}", Self::MAX_NS);
                return Err(ConfigError::new(limit, &ns, allowed));
            }
        }
        Ok(())
    }
}
