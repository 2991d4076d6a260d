//! The capabilities that observing needs.

use rustix::thread::{CapabilitySet, capabilities};

/// A capability that is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needed {
    /// What people call it.
    pub name: &'static str,
    /// Of these, one will do.
    any: CapabilitySet,
}

/// To load BPF programs and attach them to functions of processes.
pub const TO_LOAD: [Needed; 2] = [
    or_admin("CAP_BPF", CapabilitySet::BPF),
    or_admin("CAP_PERFMON", CapabilitySet::PERFMON),
];

/// To open the libraries of any process, which is to say `/proc/PID/map_files/…`.
pub const TO_SEE: [Needed; 3] = [
    Needed {
        name: "CAP_SYS_PTRACE",
        any: CapabilitySet::SYS_PTRACE,
    },
    Needed {
        name: "CAP_DAC_READ_SEARCH",
        any: CapabilitySet::DAC_READ_SEARCH.union(CapabilitySet::DAC_OVERRIDE),
    },
    or_admin("CAP_CHECKPOINT_RESTORE", CapabilitySet::CHECKPOINT_RESTORE),
];

const fn or_admin(name: &'static str, capability: CapabilitySet) -> Needed {
    Needed {
        name,
        any: capability.union(CapabilitySet::SYS_ADMIN),
    }
}

/// The capabilities that this thread can use.
#[must_use]
pub fn held() -> CapabilitySet {
    capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective)
}

/// The names of those that are needed and not held.
#[must_use]
pub fn lacking(needed: &[Needed], held: CapabilitySet) -> Vec<&'static str> {
    let lacking = needed.iter().filter(|needed| !held.intersects(needed.any));
    lacking.map(|needed| needed.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_administrator_still_has_to_be_let_into_processes() {
        let admin = CapabilitySet::SYS_ADMIN;
        assert!(lacking(&TO_LOAD, admin).is_empty());
        assert_eq!(
            lacking(&TO_SEE, admin),
            ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"]
        );
        assert!(lacking(&TO_SEE, CapabilitySet::all()).is_empty());
    }
}
