//! The simulated node: a machine with simulated GPUs, whose state its processes share.
//!
//! One file in the state directory holds the number and size of the devices and a slot per process: the identity of the
//! process, and for each device its memory in use and busy time. A process that dies leaves its slot behind. The
//! identity (pid and start time) shows that the process has exited, so another process reuses the slot.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FlockOperation, flock};

use crate::busy_meter::{BUSY_METER_WORDS, BusyMeter};
use crate::config;
use crate::process::ProcessIdentity;
use crate::shared_memory::SharedMemory;
use crate::state_directory::{AfterLastProcess, StateDirectory};

/// Largest number of devices of a node.
pub const MAX_DEVICES: usize = 16;
const MAX_PROCESSES: usize = 2048;
const DEFAULT_DEVICE_MEMORY: u64 = 16 << 30;

const NODE_FILE_MAGIC: u64 = u64::from_le_bytes(*b"zsgnode1");
const FILE_HEADER_WORDS: usize = 8;
const MAGIC_WORD_INDEX: usize = 0;
const DEVICE_COUNT_WORD_INDEX: usize = 1;
const DEVICE_MEMORY_WORD_INDEX: usize = 2;
/// Index of the header word that counts the slots that were ever in use.
const USED_SLOTS_WORD_INDEX: usize = 3;

/// Number of words at the start of a slot: pid and start time of the process. The words of each device follow.
const SLOT_HEADER_WORDS: usize = 2;
const WORDS_PER_DEVICE: usize = 2 + BUSY_METER_WORDS;
const WORDS_PER_SLOT: usize = SLOT_HEADER_WORDS + MAX_DEVICES * WORDS_PER_DEVICE;
const NODE_FILE_BYTES: usize = (FILE_HEADER_WORDS + MAX_PROCESSES * WORDS_PER_SLOT) * 8;

/// The shared state of a simulated node.
#[derive(Debug)]
pub struct Node {
    file: File,
    memory: SharedMemory,
    threads: Mutex<()>,
    directory: StateDirectory,
}

/// A lock on the shared state, which one thread of one process holds at a time.
struct NodeLock<'a> {
    node: &'a Node,
    _threads: MutexGuard<'a, ()>,
}

impl Drop for NodeLock<'_> {
    fn drop(&mut self) {
        // A lock that is held can always be released.
        let _ = flock(&self.node.file, FlockOperation::Unlock);
    }
}

/// How much of a device one process uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceUseOfProcess {
    /// Pid of the process.
    pub pid: u32,
    /// Bytes of the device's memory that the process holds.
    pub bytes: u64,
    /// The share (0 to 1) of the last half second in which the process kept the device busy.
    pub utilization: f64,
}

/// The directory of the node's state if the environment names none: one per user.
fn default_directory() -> PathBuf {
    let user = rustix::process::getuid().as_raw();
    config::path_from_variable("XDG_RUNTIME_DIR")
        .map(|path| path.join("zernel-softgpu"))
        .unwrap_or_else(|| format!("/dev/shm/zernel-softgpu-{user}").into())
}

/// The simulated hardware of a node.
#[derive(Debug, Clone, Copy)]
pub struct NodeHardware {
    /// Number of devices of the node.
    pub device_count: usize,
    /// Memory of each device in bytes.
    pub bytes_per_device: u64,
}

impl NodeHardware {
    fn from_environment() -> Self {
        Self {
            device_count: config::number_from_variable(config::DEVICES_VARIABLE, 1),
            bytes_per_device: config::number_from_variable(
                config::MEMORY_VARIABLE,
                DEFAULT_DEVICE_MEMORY,
            ),
        }
    }
}

impl Node {
    /// Opens the node whose directory and hardware the environment names.
    pub fn open() -> io::Result<Arc<Self>> {
        let hardware = NodeHardware::from_environment();
        match config::path_from_variable(config::DIRECTORY_VARIABLE) {
            Some(directory) => Self::open_in_directory(&directory, hardware),
            None => Self::enter_directory(&default_directory(), AfterLastProcess::Remove, hardware),
        }
    }

    /// Opens the node in `directory`. If no process uses it, the node gets the devices of `hardware`;
    /// otherwise it keeps its devices.
    pub fn open_in_directory(directory: &Path, hardware: NodeHardware) -> io::Result<Arc<Self>> {
        Self::enter_directory(directory, AfterLastProcess::Keep, hardware)
    }

    fn enter_directory(
        directory: &Path,
        afterwards: AfterLastProcess,
        hardware: NodeHardware,
    ) -> io::Result<Arc<Self>> {
        let (directory, file) = StateDirectory::enter(directory, afterwards)?;
        lock_file(&file)?;
        file.set_len(NODE_FILE_BYTES as u64)?;
        let memory = SharedMemory::map(&file, NODE_FILE_BYTES)?;
        let words = memory.words();
        if words[MAGIC_WORD_INDEX].load(Acquire) != NODE_FILE_MAGIC
            || !used_process_slots(words).any(|slot| slot.is_alive())
        {
            initialize_words(words, hardware);
        }
        flock(&file, FlockOperation::Unlock)?;
        Ok(Arc::new(Self {
            file,
            memory,
            threads: Mutex::new(()),
            directory,
        }))
    }

    /// Removes the node's files if no other process uses them. For the exit of a process, where values are not dropped.
    /// Threads that still run can keep using the node.
    pub fn leave(&self) {
        self.directory.leave();
    }

    fn state_words(&self) -> &[AtomicU64] {
        self.memory.words()
    }

    /// Number of devices of the node.
    #[must_use]
    pub fn device_count(&self) -> usize {
        self.state_words()[DEVICE_COUNT_WORD_INDEX].load(Relaxed) as usize
    }

    /// Memory of each device in bytes.
    #[must_use]
    pub fn memory_per_device(&self) -> u64 {
        self.state_words()[DEVICE_MEMORY_WORD_INDEX].load(Relaxed)
    }

    /// Bytes of the device's memory that are in use, by all processes.
    #[must_use]
    pub fn memory_in_use(&self, device: usize) -> u64 {
        let alive = used_process_slots(self.state_words()).filter(ProcessSlot::is_alive);
        alive
            .map(|slot| slot.device_words(device).reserved_bytes().load(Relaxed))
            .sum()
    }

    /// The processes that have a context or memory on the device.
    #[must_use]
    pub fn processes_using(&self, device: usize) -> Vec<DeviceUseOfProcess> {
        used_process_slots(self.state_words())
            .filter(ProcessSlot::is_alive)
            .filter_map(|slot| slot.use_of_device(device))
            .collect()
    }

    /// Registers the calling process as a user of the node. A process calls this once after each exec.
    pub fn register_process(self: &Arc<Self>) -> io::Result<NodeMembership> {
        self.register_process_as(ProcessIdentity::of_this_process())
    }

    fn register_process_as(self: &Arc<Self>, own: ProcessIdentity) -> io::Result<NodeMembership> {
        let _lock = self.lock_state();
        // The process may own a slot from before an exec. That program no longer uses any device, so its slot is
        // cleared.
        let before_exec =
            used_process_slots(self.state_words()).filter(|slot| slot.identity() == own);
        before_exec.for_each(|slot| slot.clear_slot());
        let free = used_process_slots(self.state_words()).position(|slot| !slot.is_alive());
        let index = match free {
            Some(index) => index,
            None => self.claim_process_slot()?,
        };
        let slot = process_slot_at(self.state_words(), index);
        slot.clear_slot();
        slot.0[1].store(own.start_time, Relaxed);
        slot.0[0].store(u64::from(own.pid), Release);
        Ok(NodeMembership {
            node: Arc::clone(self),
            slot: index,
            busy: Default::default(),
        })
    }

    fn claim_process_slot(&self) -> io::Result<usize> {
        let slots = self.state_words()[USED_SLOTS_WORD_INDEX].load(Relaxed) as usize;
        if slots == MAX_PROCESSES {
            let problem = format!("{MAX_PROCESSES} processes already use the simulated node");
            return Err(io::Error::other(problem));
        }
        self.state_words()[USED_SLOTS_WORD_INDEX].store(slots as u64 + 1, Relaxed);
        Ok(slots)
    }

    fn lock_state(&self) -> NodeLock<'_> {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let locked = lock_file(&self.file);
        assert!(
            locked.is_ok(),
            "softgpu: cannot lock the node's state: {locked:?}"
        );
        NodeLock {
            node: self,
            _threads: threads,
        }
    }

    fn reserved_memory(&self, device: usize) -> u64 {
        used_process_slots(self.state_words())
            .map(|slot| slot.device_words(device).reserved_bytes().load(Relaxed))
            .sum()
    }
}

fn lock_file(file: &File) -> io::Result<()> {
    loop {
        match flock(file, FlockOperation::LockExclusive) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

fn initialize_words(words: &[AtomicU64], hardware: NodeHardware) {
    used_process_slots(words).for_each(|slot| slot.clear_slot());
    words[USED_SLOTS_WORD_INDEX].store(0, Release);
    let devices = hardware.device_count.clamp(1, MAX_DEVICES);
    words[DEVICE_COUNT_WORD_INDEX].store(devices as u64, Relaxed);
    words[DEVICE_MEMORY_WORD_INDEX].store(hardware.bytes_per_device, Relaxed);
    words[MAGIC_WORD_INDEX].store(NODE_FILE_MAGIC, Release);
}

fn used_process_slots(words: &[AtomicU64]) -> impl Iterator<Item = ProcessSlot<'_>> {
    let used = words[USED_SLOTS_WORD_INDEX].load(Acquire) as usize;
    let all = words[FILE_HEADER_WORDS..].chunks_exact(WORDS_PER_SLOT);
    all.take(used).map(ProcessSlot)
}

fn process_slot_at(words: &[AtomicU64], index: usize) -> ProcessSlot<'_> {
    let start = FILE_HEADER_WORDS + index * WORDS_PER_SLOT;
    ProcessSlot(&words[start..start + WORDS_PER_SLOT])
}

/// The slot of one process in the file of the node.
#[derive(Clone, Copy)]
struct ProcessSlot<'a>(&'a [AtomicU64]);

/// The words about one device in a process's slot.
struct DeviceWords<'a>(&'a [AtomicU64]);

impl<'a> DeviceWords<'a> {
    fn context_count(&self) -> &'a AtomicU64 {
        &self.0[0]
    }
    fn reserved_bytes(&self) -> &'a AtomicU64 {
        &self.0[1]
    }
    fn busy_meter(&self) -> BusyMeter<'a> {
        BusyMeter(&self.0[2..])
    }
}

impl<'a> ProcessSlot<'a> {
    fn device_words(&self, device: usize) -> DeviceWords<'a> {
        let start = SLOT_HEADER_WORDS + device * WORDS_PER_DEVICE;
        DeviceWords(&self.0[start..start + WORDS_PER_DEVICE])
    }

    fn identity(&self) -> ProcessIdentity {
        ProcessIdentity {
            pid: self.0[0].load(Acquire) as u32,
            start_time: self.0[1].load(Relaxed),
        }
    }

    fn is_alive(&self) -> bool {
        let identity = self.identity();
        identity.pid != 0 && identity.is_alive()
    }

    fn clear_slot(&self) {
        self.0.iter().for_each(|word| word.store(0, Relaxed));
    }

    fn use_of_device(&self, device: usize) -> Option<DeviceUseOfProcess> {
        let words = self.device_words(device);
        let bytes = words.reserved_bytes().load(Relaxed);
        (bytes > 0 || words.context_count().load(Relaxed) > 0).then(|| DeviceUseOfProcess {
            pid: self.0[0].load(Relaxed) as u32,
            bytes,
            utilization: words.busy_meter().utilization(crate::clock::now_ns()),
        })
    }
}

/// The registration of the calling process as a user of the node.
#[derive(Debug)]
pub struct NodeMembership {
    node: Arc<Node>,
    slot: usize,
    busy: [Mutex<()>; MAX_DEVICES],
}

impl NodeMembership {
    /// The node that the process is registered on.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    fn own_device_words(&self, device: usize) -> DeviceWords<'_> {
        process_slot_at(self.node.state_words(), self.slot).device_words(device)
    }

    /// Reserves `bytes` of the device's memory for this process; false if less is free.
    #[must_use]
    pub fn reserve_memory(&self, device: usize, bytes: u64) -> bool {
        let _lock = self.node.lock_state();
        let fits = || {
            let total = self.node.reserved_memory(device).checked_add(bytes);
            total.is_some_and(|total| total <= self.node.memory_per_device())
        };
        if !fits() {
            used_process_slots(self.node.state_words())
                .filter(|slot| !slot.is_alive())
                .for_each(|slot| slot.clear_slot());
            if !fits() {
                return false;
            }
        }
        self.own_device_words(device)
            .reserved_bytes()
            .fetch_add(bytes, Relaxed);
        true
    }

    /// Releases `bytes` of the device's memory that this process had reserved.
    pub fn release_memory(&self, device: usize, bytes: u64) {
        self.own_device_words(device)
            .reserved_bytes()
            .fetch_sub(bytes, Relaxed);
    }

    /// Counts a context that this process has created on the device.
    pub fn count_created_context(&self, device: usize) {
        self.own_device_words(device)
            .context_count()
            .fetch_add(1, Relaxed);
    }

    /// Counts a context of this process that was destroyed on the device.
    pub fn count_destroyed_context(&self, device: usize) {
        self.own_device_words(device)
            .context_count()
            .fetch_sub(1, Relaxed);
    }

    /// Records that the device works for this process from `start` to `end`.
    pub fn record_busy_time(&self, device: usize, start: u64, end: u64) {
        let _lock = self.busy[device]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.own_device_words(device)
            .busy_meter()
            .add_busy_time(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_directory::STATE_FILE_NAME;
    use crate::test_directory::TestDirectory;

    const TEST_HARDWARE: NodeHardware = NodeHardware {
        device_count: 2,
        bytes_per_device: 1000,
    };

    #[test]
    fn node_memory_is_shared_and_freed_at_process_exit() {
        let directory = TestDirectory::new("node-memory");
        let node = Node::open_in_directory(directory.path(), TEST_HARDWARE).unwrap();
        let parent = ProcessIdentity::of_pid(std::os::unix::process::parent_id()).unwrap();
        let (first, second) = (
            node.register_process_as(parent).unwrap(),
            node.register_process().unwrap(),
        );
        assert!(first.reserve_memory(0, 600));
        assert!(!second.reserve_memory(0, 500));
        assert!(second.reserve_memory(1, 500));
        assert!(second.reserve_memory(0, 400));
        assert_eq!(node.memory_in_use(0), 1000);
        // The first process now looks as if it had been killed, and its pid given to another process.
        process_slot_at(node.state_words(), first.slot).0[1].fetch_add(1, Relaxed);
        assert_eq!(node.memory_in_use(0), 400);
        assert!(second.reserve_memory(0, 600));
        // The process now looks as if it had run another program.
        let again = node.register_process().unwrap();
        assert_eq!(node.memory_in_use(0), 0);
        assert!(again.reserve_memory(0, 1000));
    }

    #[test]
    fn symlink_as_state_file_is_refused() {
        let directory = TestDirectory::new("node-link");
        let victim = directory.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, directory.path().join(STATE_FILE_NAME)).unwrap();
        assert!(Node::open_in_directory(directory.path(), TEST_HARDWARE).is_err());
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    }

    #[test]
    fn node_in_use_keeps_device_count_and_memory() {
        let directory = TestDirectory::new("node-hardware");
        let other = NodeHardware {
            device_count: 7,
            bytes_per_device: 5,
        };
        let node = Node::open_in_directory(directory.path(), TEST_HARDWARE).unwrap();
        let member = node.register_process().unwrap();
        assert_eq!(
            Node::open_in_directory(directory.path(), other)
                .unwrap()
                .device_count(),
            2
        );
        process_slot_at(node.state_words(), member.slot).clear_slot();
        assert_eq!(
            Node::open_in_directory(directory.path(), other)
                .unwrap()
                .device_count(),
            7
        );
    }
}
