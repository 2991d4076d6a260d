//! The capabilities that observing needs.

use rustix::thread::{CapabilitySet, capabilities};

/// A capability that is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeededCapability {
    /// Name of the capability, such as `CAP_BPF`.
    pub name: &'static str,
    /// Each of these capabilities alone is enough.
    any_of: CapabilitySet,
}

/// Capabilities to load BPF programs and attach them to functions of processes.
pub const CAPABILITIES_TO_LOAD: [NeededCapability; 2] = [
    capability_or_sys_admin("CAP_BPF", CapabilitySet::BPF),
    capability_or_sys_admin("CAP_PERFMON", CapabilitySet::PERFMON),
];

/// Capabilities to open the libraries of any process through `/proc/PID/map_files/…`.
pub const CAPABILITIES_TO_SEE_PROCESSES: [NeededCapability; 3] = [
    NeededCapability {
        name: "CAP_SYS_PTRACE",
        any_of: CapabilitySet::SYS_PTRACE,
    },
    NeededCapability {
        name: "CAP_DAC_READ_SEARCH",
        any_of: CapabilitySet::DAC_READ_SEARCH.union(CapabilitySet::DAC_OVERRIDE),
    },
    capability_or_sys_admin("CAP_CHECKPOINT_RESTORE", CapabilitySet::CHECKPOINT_RESTORE),
];

const fn capability_or_sys_admin(
    name: &'static str,
    capability: CapabilitySet,
) -> NeededCapability {
    NeededCapability {
        name,
        any_of: capability.union(CapabilitySet::SYS_ADMIN),
    }
}

/// Capabilities that this thread can use.
#[must_use]
pub fn held_capabilities() -> CapabilitySet {
    capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective)
}

/// Names of the needed capabilities that are not held.
#[must_use]
pub fn lacking_capabilities(needed: &[NeededCapability], held: CapabilitySet) -> Vec<&'static str> {
    let lacking = needed
        .iter()
        .filter(|needed| !held.intersects(needed.any_of));
    lacking.map(|needed| needed.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sys_admin_alone_cannot_read_other_processes() {
        let admin = CapabilitySet::SYS_ADMIN;
        assert!(lacking_capabilities(&CAPABILITIES_TO_LOAD, admin).is_empty());
        assert_eq!(
            lacking_capabilities(&CAPABILITIES_TO_SEE_PROCESSES, admin),
            ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"]
        );
        assert!(
            lacking_capabilities(&CAPABILITIES_TO_SEE_PROCESSES, CapabilitySet::all()).is_empty()
        );
    }
}
