//! Labels that a program gives its own time, and what they mean in each view.

use zernel_phase::WorkloadPhase;

/// Declares the labels with their names in stamp logs.
macro_rules! declare_stamp_labels {
    ($($(#[$doc:meta])* $label:ident = $name:literal,)*) => {
        /// What a thread does, as the program itself labels it. The innermost label counts.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum StampLabel {
            $($(#[$doc])* $label,)*
        }

        impl StampLabel {
            /// All labels.
            pub const ALL: &[Self] = &[$(Self::$label,)*];

            /// The label with a name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$label),)*
                    _ => None,
                }
            }

            /// Its name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$label => $name,)*
                }
            }
        }
    };
}

declare_stamp_labels! {
    /// Waits for the next batch.
    Data = "data",
    /// The forward pass.
    Forward = "forward",
    /// The backward pass.
    Backward = "backward",
    /// The optimizer: step, zero_grad, clipping, scaler.
    Optimizer = "optimizer",
    /// Blocked on the GPU.
    Gpu = "gpu",
    /// Blocked in a collective or a barrier.
    Peer = "peer",
    /// Compiles.
    Compile = "compile",
    /// Time of an evaluation outside of its forward passes.
    Evaluation = "evaluation",
    /// Writes a checkpoint.
    Checkpoint = "checkpoint",
    /// Any other work of the training loop.
    Host = "host",
    /// Sleeps.
    Sleep = "sleep",
    /// A loader at work.
    Feed = "feed",
    /// A loader that waits to deliver or for work.
    FeedIdle = "feed_idle",
    /// Outside of every label.
    Other = "other",
}

impl StampLabel {
    /// The phase that a process with this label is in.
    #[must_use]
    pub fn workload_phase(self) -> WorkloadPhase {
        match self.step_activity() {
            StepActivity::DataWait => WorkloadPhase::DataLoading,
            StepActivity::HostWork | StepActivity::GpuWait => WorkloadPhase::GpuCompute,
            StepActivity::PeerWait => WorkloadPhase::NcclCollective,
            StepActivity::Optimizer => WorkloadPhase::OptimizerStep,
            StepActivity::Unknown => WorkloadPhase::Unknown,
        }
    }

    /// The activity of a step that this label stands for: phases with GPU waits apart, as reports for people show
    /// them.
    #[must_use]
    pub fn step_activity(self) -> StepActivity {
        match self {
            Self::Data => StepActivity::DataWait,
            Self::Forward | Self::Backward | Self::Host => StepActivity::HostWork,
            Self::Gpu => StepActivity::GpuWait,
            Self::Peer => StepActivity::PeerWait,
            Self::Optimizer => StepActivity::Optimizer,
            Self::Compile
            | Self::Evaluation
            | Self::Checkpoint
            | Self::Sleep
            | Self::Feed
            | Self::FeedIdle
            | Self::Other => StepActivity::Unknown,
        }
    }

    /// The class of a thread with this label, for a scheduler.
    #[must_use]
    pub fn thread_class(self) -> ThreadClass {
        match self {
            Self::Forward | Self::Backward | Self::Optimizer | Self::Host | Self::Peer => {
                ThreadClass::Critical
            }
            Self::Feed => ThreadClass::Feed,
            Self::Gpu => ThreadClass::GpuWait,
            Self::Data
            | Self::Compile
            | Self::Evaluation
            | Self::Checkpoint
            | Self::Sleep
            | Self::FeedIdle
            | Self::Other => ThreadClass::Other,
        }
    }
}

/// What the step of a process is spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // the names are self-explanatory
pub enum StepActivity {
    DataWait,
    HostWork,
    GpuWait,
    PeerWait,
    Optimizer,
    Unknown,
}

impl StepActivity {
    /// The activity of a thread in a phase. `is_in_gpu_sync`: whether the thread is in a call that waits for the GPU.
    #[must_use]
    pub fn of_phase(phase: WorkloadPhase, is_in_gpu_sync: bool) -> Self {
        match phase {
            WorkloadPhase::DataLoading => Self::DataWait,
            WorkloadPhase::GpuCompute if is_in_gpu_sync => Self::GpuWait,
            WorkloadPhase::GpuCompute => Self::HostWork,
            WorkloadPhase::NcclCollective => Self::PeerWait,
            WorkloadPhase::OptimizerStep => Self::Optimizer,
            WorkloadPhase::Unknown => Self::Unknown,
        }
    }
}

/// How a scheduler should treat a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // the names are self-explanatory
pub enum ThreadClass {
    Critical,
    Feed,
    GpuWait,
    Other,
}

/// A set of categories that time is divided into.
pub trait TimeCategory: Copy + Ord + 'static {
    /// All categories.
    const ALL: &'static [Self];
    /// The category without evidence.
    const UNKNOWN: Self;
    /// Its name in reports.
    fn name(self) -> &'static str;
}

/// A [`WorkloadPhase`] as a [`TimeCategory`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // the names are those of the phases
pub enum PhaseCategory {
    DataLoading,
    GpuCompute,
    NcclCollective,
    OptimizerStep,
    Unknown,
}

impl From<WorkloadPhase> for PhaseCategory {
    fn from(phase: WorkloadPhase) -> Self {
        match phase {
            WorkloadPhase::DataLoading => Self::DataLoading,
            WorkloadPhase::GpuCompute => Self::GpuCompute,
            WorkloadPhase::NcclCollective => Self::NcclCollective,
            WorkloadPhase::OptimizerStep => Self::OptimizerStep,
            WorkloadPhase::Unknown => Self::Unknown,
        }
    }
}

impl TimeCategory for PhaseCategory {
    const ALL: &'static [Self] = &[
        Self::DataLoading,
        Self::GpuCompute,
        Self::NcclCollective,
        Self::OptimizerStep,
        Self::Unknown,
    ];
    const UNKNOWN: Self = Self::Unknown;

    fn name(self) -> &'static str {
        match self {
            Self::DataLoading => "DataLoading",
            Self::GpuCompute => "GpuCompute",
            Self::NcclCollective => "NcclCollective",
            Self::OptimizerStep => "OptimizerStep",
            Self::Unknown => "Unknown",
        }
    }
}

impl TimeCategory for StepActivity {
    const ALL: &'static [Self] = &[
        Self::DataWait,
        Self::HostWork,
        Self::GpuWait,
        Self::PeerWait,
        Self::Optimizer,
        Self::Unknown,
    ];
    const UNKNOWN: Self = Self::Unknown;

    fn name(self) -> &'static str {
        match self {
            Self::DataWait => "data wait",
            Self::HostWork => "host work",
            Self::GpuWait => "GPU wait",
            Self::PeerWait => "peer wait",
            Self::Optimizer => "optimizer",
            Self::Unknown => "unknown",
        }
    }
}

impl TimeCategory for ThreadClass {
    const ALL: &'static [Self] = &[Self::Critical, Self::Feed, Self::GpuWait, Self::Other];
    const UNKNOWN: Self = Self::Other;

    fn name(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Feed => "feed",
            Self::GpuWait => "GPU wait",
            Self::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_label_has_its_own_name() {
        for label in StampLabel::ALL {
            assert_eq!(StampLabel::from_name(label.name()), Some(*label));
        }
        assert_eq!(StampLabel::from_name("step"), None);
    }

    #[test]
    fn labels_map_to_phases_and_classes() {
        let expected = [
            ("data", "DataLoading", ThreadClass::Other),
            ("forward", "GpuCompute", ThreadClass::Critical),
            ("gpu", "GpuCompute", ThreadClass::GpuWait),
            ("peer", "NcclCollective", ThreadClass::Critical),
            ("optimizer", "OptimizerStep", ThreadClass::Critical),
            ("checkpoint", "Unknown", ThreadClass::Other),
            ("feed", "Unknown", ThreadClass::Feed),
        ];
        for (name, phase, class) in expected {
            let label = StampLabel::from_name(name).unwrap();
            assert_eq!(PhaseCategory::from(label.workload_phase()).name(), phase);
            assert_eq!(label.thread_class(), class);
        }
    }
}
