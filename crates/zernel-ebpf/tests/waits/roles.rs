//! The observed programs, and their reports of their own waits.

use std::fs::{self, File, OpenOptions};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::time::Duration;
use std::{env, thread};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use zernel_ebpf::probes::SchedBlockReason;
use zernel_testkit::communicator::{UniqueId, unique_id};
use zernel_testkit::eventually;
use zernel_testkit::target::{Driver, ROLE_VARIABLE, TargetRole, call, out_pointer};

/// Where a target writes its report.
const REPORT_VARIABLE: &str = "ZERNEL_TARGET_LIBRARIES";

/// How long one of two loaders takes for a batch.
const BATCH_MS: u64 = 20;

pub(crate) const WAITING_ROLES: &[(&str, TargetRole)] = &[
    ("trains_with_busy_loaders", |driver, rounds| {
        train_with_loaders(driver, rounds, burn_cpu);
    }),
    ("trains_with_reading_loaders", |driver, rounds| {
        train_with_loaders(driver, rounds, read_from_disk::<LOADER_READ_BYTES>);
    }),
    ("trains_with_sleeping_loaders", |driver, rounds| {
        train_with_loaders(driver, rounds, thread::sleep);
    }),
    ("trains_with_downloading_loaders", |driver, rounds| {
        train_with_loaders(driver, rounds, download);
    }),
    ("trains_with_thousands_of_threads", |driver, rounds| {
        train_with_loaders(driver, rounds, download_by_many);
    }),
    ("trains_after_a_loader_was_killed", |driver, rounds| {
        driver.open_first_device();
        LoaderProcess::fork(download_by_many).kill();
        train_with_loaders(driver, rounds, thread::sleep);
    }),
    ("trains_alone", target_train_alone),
    ("trains_alone_beside_a_helper", |driver, rounds| {
        // It gets no requests.
        driver.open_first_device();
        let _idle = LoaderProcess::fork(thread::sleep);
        target_train_alone(driver, rounds);
    }),
    (
        "trains_with_a_loading_thread",
        target_train_with_a_loading_thread,
    ),
    ("is_a_slow_rank", |driver, rounds| {
        reduce_as_rank(driver, rounds, 0, Driver::synchronize);
    }),
    ("is_a_fast_rank", |driver, rounds| {
        reduce_as_rank(driver, rounds, 1, Driver::synchronize);
    }),
    ("is_a_fast_rank_that_reads", |driver, rounds| {
        driver.open_device(1);
        let sum = driver.allocate_memory(8);
        reduce_as_rank(driver, rounds, 1, |driver| read_number(driver, sum));
    }),
    ("blocks", target_block_in_every_way),
    ("has_threads", target_start_threads_before_ml),
    ("spins", target_spin_without_pause),
    ("forks", target_fork_children),
    ("idles", |_, _| write_report(&RoleReport::default())),
];

/// A target's own measurements.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RoleReport {
    /// How long the target waited for data, in nanoseconds.
    pub(crate) waited_ns: u64,
    pub(crate) waits: u64,
    /// CPU time in nanoseconds that the requested work used.
    pub(crate) cpu_ns: u64,
    pub(crate) children: Vec<u32>,
    /// How long the target was blocked in nanoseconds, by reason, in the order of `SchedBlockReason`.
    pub(crate) blocked_ns: [u64; 7],
}

pub(crate) fn report_path(libraries: &std::path::Path, pid: u32) -> PathBuf {
    libraries.join(format!("report-{pid}"))
}

fn write_report(report: &RoleReport) {
    let libraries = PathBuf::from(env::var_os(REPORT_VARIABLE).expect("set by the stage"));
    let text = serde_json::to_string(report).expect("plain numbers");
    fs::write(report_path(&libraries, std::process::id()), text).expect("a writable folder");
}

fn now_ns(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A target that uses CPU time, and nothing else.
fn burn_cpu(how_long: Duration) {
    let end = now_ns(ClockId::ThreadCPUTime) + how_long;
    while now_ns(ClockId::ThreadCPUTime) < end {
        std::hint::spin_loop();
    }
}

/// A buffer for reads past the page cache.
#[repr(align(4096))]
struct AlignedBuffer<const FILE_BYTES: usize>([u8; FILE_BYTES]);

/// Size of a loader's reads.
const LOADER_READ_BYTES: usize = 256 << 10;
/// Size of reads whose blocked time is measured. Each switch adds some microseconds to it, so a read blocks for far
/// longer than that.
const LONG_READ_BYTES: usize = 1 << 20;

/// Reads a file past the page cache.
fn read_from_disk<const READ: usize>(how_long: Duration) {
    const FILE_BYTES: u64 = 16 << 20;
    let folder = PathBuf::from(env::var_os(REPORT_VARIABLE).expect("set by the stage"));
    let path = folder.join(format!("data-{}", std::process::id()));
    if !path.exists() {
        fs::write(&path, vec![7; FILE_BYTES as usize]).expect("a writable folder");
        File::open(&path)
            .and_then(|file| file.sync_all())
            .expect("a disk");
    }
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .expect("a disk");
    let mut buffer = Box::new(AlignedBuffer([0; READ]));
    let end = now_ns(ClockId::Monotonic) + how_long;
    let mut offset = 0;
    while now_ns(ClockId::Monotonic) < end {
        file.read_exact_at(&mut buffer.0, offset)
            .expect("a file that stays");
        offset = (offset + READ as u64) % FILE_BYTES;
    }
}

fn wait_until_readable(file: &impl AsRawFd) {
    let mut polled = libc::pollfd {
        fd: file.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: `polled` is one valid pollfd.
    assert_eq!(unsafe { libc::poll(&raw mut polled, 1, -1) }, 1);
}

/// Waits with a timeout for another process to send something.
fn download(how_long: Duration) {
    let server = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let mut client = TcpStream::connect(server.local_addr().expect("bound")).expect("it listens");
    let (mut served, _) = server.accept().expect("a peer");
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(how_long);
            served.write_all(&[1]).expect("it waits");
        });
        wait_until_readable(&client);
    });
    client.read_exact(&mut [0]).expect("sent");
}

/// Number of threads that each of two loaders downloads with. The two loaders together have one thread more than twelve
/// bits can count.
const DOWNLOADING_THREADS: usize = 2048;

/// Waits while many threads wait for data that never comes.
fn download_by_many(how_long: Duration) {
    if how_long.is_zero() {
        let server = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = server.local_addr().expect("bound");
        let client: &_ = Box::leak(Box::new(TcpStream::connect(address).expect("it listens")));
        let _never_sends = Box::leak(Box::new(server.accept().expect("a peer")));
        let download = move || {
            let mut client = client;
            let _ = client.read(&mut [0]);
        };
        for _ in 0..DOWNLOADING_THREADS {
            let thread = thread::Builder::new().stack_size(64 << 10);
            thread.spawn(download).expect("room for a thread");
        }
    }
    thread::sleep(how_long);
}

/// Waits on a futex until the timeout.
fn wait_on_futex(futex: &AtomicU32, how_long: Duration) {
    let timeout = libc::timespec {
        tv_sec: 0,
        tv_nsec: how_long.as_nanos() as i64,
    };
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the futex and the timeout outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            futex.as_ptr(),
            operation,
            0,
            &raw const timeout,
        );
    }
}

/// A loader process, which gives a batch for every byte it is sent.
struct LoaderProcess {
    pid: i32,
    requests: PipeWriter,
    batches: PipeReader,
}

impl LoaderProcess {
    fn fork(work: fn(Duration)) -> Self {
        let (mut asked, ask) = std::io::pipe().expect("a pipe");
        let (given, mut give) = std::io::pipe().expect("a pipe");
        // SAFETY: this program has one thread, so its child may do whatever it could.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop((ask, given));
            // A loader that reads creates its file first.
            work(Duration::ZERO);
            let mut order = [0];
            while asked.read_exact(&mut order).is_ok() {
                work(Duration::from_millis(BATCH_MS));
                if give.write_all(&order).is_err() {
                    break;
                }
            }
            std::process::exit(0);
        }
        Self {
            pid,
            requests: ask,
            batches: given,
        }
    }

    /// Kills the loader once it is ready for work.
    fn kill(mut self) {
        self.request_batch();
        self.take_next_batch();
        // SAFETY: our own child. The exit status of the child is not needed.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }

    fn request_batch(&mut self) {
        self.requests.write_all(&[1]).expect("the loader lives");
    }

    /// Polls, then reads, as the queue of a PyTorch loader does.
    fn take_next_batch(&mut self) {
        wait_until_readable(&self.batches);
        self.batches.read_exact(&mut [0]).expect("the loader lives");
    }
}

/// Gives this thread real-time priority, so that its clock does not include time in which others run.
fn run_before_others() {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: a valid parameter for the calling thread.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) };
    assert_eq!(result, 0, "root may");
}

fn run_step(driver: &Driver, device: u64, function: u64) {
    let mut batch = [0_u8; 4096];
    driver.copy_to_device(device, &mut batch);
    driver.launch_kernel(function);
    driver.synchronize();
}

/// Trains with two loader processes that are slower than the GPU.
fn train_with_loaders(driver: &Driver, rounds: u64, work: fn(Duration)) {
    let mut report = RoleReport::default();
    // Opened before the fork, as by a trainer that has moved its model to the GPU.
    driver.open_first_device();
    let (function, device) = (driver.load_empty_kernel(), driver.allocate_memory(4096));
    run_step(driver, device, function);
    let mut loaders = [LoaderProcess::fork(work), LoaderProcess::fork(work)];
    run_before_others();
    for loader in &mut loaders {
        loader.request_batch();
    }
    for round in 0..rounds as usize {
        let loader = &mut loaders[round % 2];
        let before = now_ns(ClockId::Monotonic);
        loader.take_next_batch();
        report.waited_ns += (now_ns(ClockId::Monotonic) - before).as_nanos() as u64;
        report.waits += 1;
        loader.request_batch();
        run_step(driver, device, function);
    }
    write_report(&report);
}

/// A training loop that reads and prepares its data itself, without loaders.
fn target_train_alone(driver: &Driver, rounds: u64) {
    let mut report = RoleReport::default();
    driver.open_first_device();
    let (function, device) = (driver.load_empty_kernel(), driver.allocate_memory(4096));
    run_step(driver, device, function);
    read_from_disk::<LOADER_READ_BYTES>(Duration::ZERO);
    run_before_others();
    for _ in 0..rounds {
        let before = now_ns(ClockId::Monotonic);
        read_from_disk::<LOADER_READ_BYTES>(Duration::from_millis(BATCH_MS));
        burn_cpu(Duration::from_millis(BATCH_MS / 4));
        report.waited_ns += (now_ns(ClockId::Monotonic) - before).as_nanos() as u64;
        report.waits += 1;
        run_step(driver, device, function);
    }
    write_report(&report);
}

/// A training loop that never waits for the GPU, and gets its batches from a thread. Only the copy after a wait
/// distinguishes its waits for data from waits for a backward pass.
fn target_train_with_a_loading_thread(driver: &Driver, rounds: u64) {
    let mut report = RoleReport::default();
    driver.open_first_device();
    let (function, device) = (driver.load_empty_kernel(), driver.allocate_memory(4096));
    run_step(driver, device, function);
    let (sender, batches) = std::sync::mpsc::sync_channel(1);
    thread::spawn(move || {
        while sender.send([0_u8; 4096]).is_ok() {
            burn_cpu(Duration::from_millis(BATCH_MS));
        }
    });
    run_before_others();
    for _ in 0..rounds {
        let before = now_ns(ClockId::Monotonic);
        let mut batch = batches.recv().expect("the thread goes on");
        report.waited_ns += (now_ns(ClockId::Monotonic) - before).as_nanos() as u64;
        report.waits += 1;
        driver.copy_to_device(device, &mut batch);
        driver.launch_kernel(function);
    }
    write_report(&report);
}

/// A communicator of two ranks.
fn join_communicator(driver: &Driver, rank: i32) -> u64 {
    let id = unique_id(driver, rank as u64);
    let mut communicator = 0_u64;
    // SAFETY: NCCL's own signature.
    let result = unsafe {
        let init: libloading::Symbol<
            '_,
            unsafe extern "C" fn(*mut u64, i32, UniqueId, i32) -> i32,
        > = driver
            .nccl()
            .get(b"ncclCommInitRank\0")
            .expect("every NCCL has it");
        init(&raw mut communicator, 2, id, rank)
    };
    assert_eq!(result, 0);
    communicator
}

/// Copies a number to pageable memory, as `item()` does: the copy returns when the GPU is done.
fn read_number(driver: &Driver, device: u64) {
    let mut number = 0_u64;
    let copied = out_pointer(&mut number);
    call!(driver.cuda(), "cuMemcpyDtoHAsync_v2", copied, device, 8, 0);
}

/// Reduces with another rank, and awaits the result. The first of the two ranks is late in every reduction.
fn reduce_as_rank(driver: &Driver, rounds: u64, rank: i32, await_result: impl Fn(&Driver)) {
    let mut report = RoleReport::default();
    driver.open_device(rank as u64);
    let communicator = join_communicator(driver, rank);
    let buffer = driver.allocate_memory(4096);
    for _ in 0..rounds {
        if rank == 0 {
            thread::sleep(Duration::from_millis(BATCH_MS));
        }
        call!(
            driver.nccl(),
            "ncclAllReduce",
            buffer,
            buffer,
            1,
            7,
            0,
            communicator,
            0
        );
        let before = now_ns(ClockId::Monotonic);
        await_result(driver);
        report.waited_ns += (now_ns(ClockId::Monotonic) - before).as_nanos() as u64;
        report.waits += 1;
    }
    write_report(&report);
}

/// A process at the other end of a socket that sends data every `BATCH_MS` milliseconds.
struct SendingProcess {
    pipe: PipeReader,
    polled: PipeReader,
    unix: UnixStream,
    tcp: TcpStream,
}

impl SendingProcess {
    /// Forks a process that is not observed.
    fn fork() -> Self {
        let (pipe, mut pipe_end) = std::io::pipe().expect("a pipe");
        let (polled, mut polled_end) = std::io::pipe().expect("a pipe");
        let (unix, mut unix_end) = UnixStream::pair().expect("a socket");
        let server = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = server.local_addr().expect("bound");
        // SAFETY: this program has one thread, so its child may do whatever it could.
        if unsafe { libc::fork() } == 0 {
            let (mut tcp_end, _) = server.accept().expect("a peer");
            loop {
                thread::sleep(Duration::from_millis(BATCH_MS));
                let ends: [&mut dyn Write; 4] =
                    [&mut pipe_end, &mut polled_end, &mut unix_end, &mut tcp_end];
                if ends.into_iter().any(|end| end.write_all(&[1]).is_err()) {
                    std::process::exit(0);
                }
            }
        }
        let tcp = TcpStream::connect(address).expect("a process listens");
        Self {
            pipe,
            polled,
            unix,
            tcp,
        }
    }

    /// Reads all available data, so that the next read waits.
    fn read_all_available(&mut self) {
        let files: [&dyn AsRawFd; 4] = [&self.pipe, &self.polled, &self.unix, &self.tcp];
        for file in files.map(AsRawFd::as_raw_fd) {
            let mut bytes = [0_u8; 512];
            let mut ready = 0;
            // SAFETY: an open descriptor, memory of ours, and no more than there is to read.
            unsafe {
                libc::ioctl(file, libc::FIONREAD, &raw mut ready);
                libc::read(file, bytes.as_mut_ptr().cast(), ready.min(512) as usize);
            }
        }
    }
}

/// The clocks of the current thread: what is neither CPU time nor waiting for a CPU is blocked time.
struct ThreadTimes {
    wall: Duration,
    cpu: Duration,
    run_delay: Duration,
}

impl ThreadTimes {
    fn now() -> Self {
        let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
        let run_delay = stat.split(' ').nth(1).and_then(|delay| delay.parse().ok());
        Self {
            wall: now_ns(ClockId::Monotonic),
            cpu: now_ns(ClockId::ThreadCPUTime),
            run_delay: Duration::from_nanos(run_delay.expect("a number")),
        }
    }

    /// How long the thread was blocked between these times and now.
    fn blocked_time(&self) -> Duration {
        let now = Self::now();
        let ran = (now.cpu - self.cpu) + (now.run_delay - self.run_delay);
        (now.wall - self.wall).saturating_sub(ran)
    }
}

/// Blocks in every way, one after the other.
fn target_block_in_every_way(driver: &Driver, rounds: u64) {
    let mut feeder = SendingProcess::fork();
    // The file is written before the process uses CUDA, so that no probe counts it.
    read_from_disk::<LONG_READ_BYTES>(Duration::ZERO);
    driver.open_first_device();
    let mut report = RoleReport::default();
    run_before_others();
    let mut byte = [0];
    let futex = AtomicU32::new(0);
    let batch = Duration::from_millis(BATCH_MS);
    for by in SchedBlockReason::ALL {
        for _ in 0..rounds {
            feeder.read_all_available();
            let before = ThreadTimes::now();
            match by {
                SchedBlockReason::Io => read_from_disk::<LONG_READ_BYTES>(batch),
                SchedBlockReason::Network => feeder.tcp.read_exact(&mut byte).expect("fed"),
                SchedBlockReason::Ipc => feeder.pipe.read_exact(&mut byte).expect("fed"),
                SchedBlockReason::Futex => wait_on_futex(&futex, batch),
                SchedBlockReason::Poll => wait_until_readable(&feeder.polled),
                SchedBlockReason::PageFault => continue,
                SchedBlockReason::Other => thread::sleep(batch),
            }
            report.blocked_ns[by as usize] += before.blocked_time().as_nanos() as u64;
        }
    }
    feeder.read_all_available();
    write_report(&report);
}

/// Starts threads, and only then becomes an ML process.
fn target_start_threads_before_ml(driver: &Driver, _rounds: u64) {
    let (sender, receiver) = std::sync::mpsc::channel();
    for _ in 0..3 {
        let sender = sender.clone();
        thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            sender.send(tid as u32).expect("the main thread waits");
            thread::sleep(Duration::from_secs(600));
        });
    }
    let children = receiver.iter().take(3).collect();
    driver.open_first_device();
    write_report(&RoleReport {
        children,
        ..RoleReport::default()
    });
}

/// A target that uses its CPU without a pause.
fn target_spin_without_pause(driver: &Driver, rounds: u64) {
    driver.open_first_device();
    let before = now_ns(ClockId::ThreadCPUTime);
    burn_cpu(Duration::from_millis(rounds));
    // The thread sleeps, because its CPU time is counted when it is switched out.
    thread::sleep(Duration::from_millis(1));
    write_report(&RoleReport {
        cpu_ns: (now_ns(ClockId::ThreadCPUTime) - before).as_nanos() as u64,
        ..RoleReport::default()
    });
}

/// Forks a child that stays as it is, one that execs another program, and one that execs this program again.
fn target_fork_children(driver: &Driver, _rounds: u64) {
    driver.open_first_device();
    let fork = |act: fn()| {
        // SAFETY: this program has one thread, so its child may do whatever it could.
        match unsafe { libc::fork() } {
            0 => {
                act();
                std::process::exit(0);
            }
            pid => pid as u32,
        }
    };
    let stays = fork(|| thread::sleep(Duration::from_secs(600)));
    let executes = fork(|| {
        use std::os::unix::process::CommandExt;
        let _ = std::process::Command::new("sleep").arg("600").exec();
    });
    let executes_own = fork(|| {
        use std::os::unix::process::CommandExt;
        let program = env::current_exe().expect("it runs");
        let _ = std::process::Command::new(program)
            .env(ROLE_VARIABLE, "idles")
            .exec();
    });
    let comm = format!("/proc/{executes}/comm");
    eventually("the child executes sleep", || {
        fs::read_to_string(&comm).is_ok_and(|name| name == "sleep\n")
    });
    let environment = format!("/proc/{executes_own}/environ");
    eventually("the child executes this program", || {
        let role = format!("{ROLE_VARIABLE}=idles");
        fs::read_to_string(&environment).is_ok_and(|text| text.contains(&role))
    });
    write_report(&RoleReport {
        children: vec![stays, executes, executes_own],
        ..RoleReport::default()
    });
}
