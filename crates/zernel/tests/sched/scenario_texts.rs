//! The scenarios that only these tests run, as text.

/// A trainer with a backward thread and a trainer that waits for its loaders, beside spinners.
pub(super) const TRAINERS_SCENARIO: &str = r#"
about = "Hand-off and feed."
warmup_ms = 2000
duration_ms = 600
observe = true
training = ["backward", "loading"]
noise = ["noise"]

[[group]]
name = "backward"
workers = 3
pcomm = "trainer"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 500, backward_us = 2000, gpu_us = 1500 }

[[group]]
name = "loading"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 4000, forked_loaders = true, gpu_us = 500 }

[[group]]
name = "noise"
workers = 8
work = "spin_wait"
"#;

/// Each of these real-time tasks would make a step 3 ms longer if the trainer waited for it.
pub(super) const DISPLACED_TRAINER_SCENARIO: &str = r#"
about = "A trainer that spins while it waits for the GPU, beside spinners, and a real-time task on each CPU."
warmup_ms = 2000
duration_ms = 1500
observe = true
training = ["trainer"]
noise = ["noise"]

[[group]]
name = "trainer"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, ranks = 1, decode_us = 500, forked_loaders = true, gpu_us = 3000, gpu_wait = "spin" }

[[group]]
name = "noise"
workers = 8
work = "spin_wait"

[[group]]
name = "first"
affinity = { exact = [0] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 19000, compute_us = 3000 }

[[group]]
name = "second"
affinity = { exact = [1] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 23000, compute_us = 3000 }

[[group]]
name = "third"
affinity = { exact = [2] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 29000, compute_us = 3000 }

[[group]]
name = "fourth"
affinity = { exact = [3] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 31000, compute_us = 3000 }

[[assert]]
step_time = { group = "trainer", quantile = 0.9, at_most_us = 5500 }
"#;

/// A trainer that may use the first NUMA node only, until its GPU is known. The first trainer makes the library known, so
/// that the second one is observed from its start.
pub(super) const GPU_NODE_SCENARIO: &str = r#"
about = "A trainer on the wrong NUMA node."
topology = "2x1x2x1"
warmup_ms = 1000
duration_ms = 5000
observe = true
training = ["trainer"]

[[group]]
name = "first"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 500, forked_loaders = true, gpu_us = 1500 }

[[group]]
name = "trainer"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 500, forked_loaders = true, gpu_us = 1500 }

[[cgroup]]
name = "trainer"
groups = ["trainer"]
cpus = [0, 1]

[[step]]
at_ms = 100
action = { add = "trainer" }

[[step]]
at_ms = 4000
action = { set = { name = "trainer", cpus = [0, 1, 2, 3] } }
"#;

/// Beside a task of great weight the virtual clock slows down. Tasks of tiny weight that wait for it still run before the
/// kernel's watchdog ejects the scheduler.
pub(super) const WEIGHTS_SCENARIO: &str = r#"
about = "Tiny weights beside a great one."
topology = "1"
warmup_ms = 100
duration_ms = 3000

[[group]]
name = "light"
workers = 2
nice = 19
work = "spin_wait"

[[group]]
name = "heavy"
nice = -20
work = "spin_wait"

[[step]]
at_ms = 300
action = { add = "heavy" }

[[assert]]
starvation = { at_most_ms = 800 }
"#;

/// The weights scenario for tasks in the queue of a cache: it needs two CPUs, because on one CPU all tasks count as
/// pinned.
pub(super) const UNPINNED_WEIGHTS_SCENARIO: &str = r#"
about = "Tiny weights beside great ones on two CPUs."
topology = "2"
warmup_ms = 100
duration_ms = 3000

[[group]]
name = "light"
workers = 4
nice = 19
work = "spin_wait"

[[group]]
name = "heavy"
workers = 2
nice = -20
work = "spin_wait"

[[step]]
at_ms = 300
action = { add = "heavy" }

[[assert]]
starvation = { at_most_ms = 800 }
"#;

/// The CPU compares the pinned task with the others by the shared clock, which hardly advances.
pub(super) const PINNED_WEIGHT_SCENARIO: &str = r#"
about = "A pinned task of tiny weight beside great ones that may use both CPUs."
topology = "2"
warmup_ms = 100
duration_ms = 3000

[[group]]
name = "light"
nice = 19
affinity = { exact = [0] }
work = "spin_wait"

[[group]]
name = "heavy"
workers = 3
nice = -20
work = "spin_wait"

[[step]]
at_ms = 300
action = { add = "heavy" }

[[assert]]
starvation = { at_most_ms = 800 }
"#;

/// Every CPU has critical threads of its own at any time.
pub(super) const CRITICAL_THREADS_SCENARIO: &str = r#"
about = "Two pinned critical threads per CPU beside one that may use both CPUs."
topology = "2"
warmup_ms = 2500
duration_ms = 2500
observe = true
training = ["pinned", "free"]

[[group]]
name = "pinned"
workers = 4
affinity = { per_worker = [[0], [0], [1], [1]] }
work.inference = { gpu = { driver = "/softgpu/libcuda.so.1" }, period_us = 1, copy_kib = 1, launches = 50, launch_us = 20, gpu_us = 1, gpu_wait = "spin" }

[[group]]
name = "free"
work.inference = { gpu = { driver = "/softgpu/libcuda.so.1" }, period_us = 1, copy_kib = 1, launches = 50, launch_us = 20, gpu_us = 1, gpu_wait = "spin" }

[[assert]]
starvation = { at_most_ms = 100 }
"#;

/// Critical threads that never sleep leave a tenth of the CPUs to all others, and the observer is one of them.
pub(super) const BUSY_OBSERVER_SCENARIO: &str = r#"
about = "A critical thread per CPU that never sleeps, spinners and the observer."
topology = "2"
warmup_ms = 2500
duration_ms = 2500
observe = true
training = ["critical"]
noise = ["noise"]

[[group]]
name = "critical"
workers = 2
work.inference = { gpu = { driver = "/softgpu/libcuda.so.1" }, period_us = 1, copy_kib = 1, launches = 50, launch_us = 20, gpu_us = 1, gpu_wait = "spin" }

[[group]]
name = "noise"
workers = 6
work = "spin_wait"

[[assert]]
starvation = { at_most_ms = 1000 }
"#;

/// Ranks that spin until the GPU is done, and loaders that lack CPUs.
pub(super) const SPINNING_RANKS_SCENARIO: &str = r#"
about = "Two ranks that spin while they wait for the GPU, and eight loaders."
warmup_ms = 3000
duration_ms = 2000
observe = true
training = ["training"]

[[group]]
name = "training"
workers = 2
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, ranks = 2, loaders = 4, forked_loaders = true, decode_us = 8000, gpu_us = 4000, gpu_wait = "spin" }
"#;

/// The same ranks beside spinners, while a CPU goes and comes back, and while the CPUs and the limit of their cgroup change.
pub(super) const DISTURBED_RANKS_SCENARIO: &str = r#"
about = "Two ranks that spin while they wait for the GPU, and eight loaders beside spinners, with changes of their CPUs."
warmup_ms = 2000
duration_ms = 1600
observe = true
training = ["training"]
noise = ["noise"]

[[group]]
name = "training"
workers = 2
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, ranks = 2, loaders = 4, forked_loaders = true, decode_us = 8000, gpu_us = 4000, gpu_wait = "spin" }

[[group]]
name = "noise"
workers = 4
work = "spin_wait"

[[cgroup]]
name = "training"
groups = ["training"]

[[step]]
at_ms = 2200
action = { set = { name = "training", cpus = [0, 1] } }

[[step]]
at_ms = 2400
action = { set = { name = "training", cpus = [2, 3] } }

[[step]]
at_ms = 2600
action = { set = { name = "training", cpus = [0, 1, 2, 3] } }

[[step]]
at_ms = 2700
action = { offline = 3 }

[[step]]
at_ms = 3000
action = { online = 3 }

[[step]]
at_ms = 3200
action = { set = { name = "training", max_ms_per_100ms = 150 } }
"#;

/// The same ranks while their turns are disturbed: by real-time tasks, by spinners that can run on one CPU only, and by
/// the end of the observer.
pub(super) const DISTURBED_TURNS_SCENARIO: &str = r#"
about = "Two ranks that spin while they wait for the GPU, and eight loaders, beside real-time tasks and pinned spinners."
warmup_ms = 1000
duration_ms = 4000
observe = true
training = ["training"]
noise = ["pinned"]

[[group]]
name = "training"
workers = 2
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, ranks = 2, loaders = 4, forked_loaders = true, decode_us = 8000, gpu_us = 4000, gpu_wait = "spin" }

[[group]]
name = "pinned"
workers = 4
affinity = { per_worker = [[0], [1], [2], [3]] }
work = "spin_wait"

[[group]]
name = "realtime"
workers = 4
affinity = { per_worker = [[0], [1], [2], [3]] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 3700, compute_us = 400 }
"#;
