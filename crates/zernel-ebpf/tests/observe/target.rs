//! Programs to be observed: this test program again, told by its environment what to be.

use std::ffi::{CString, c_void};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::{env, fs, ptr};

use libloading::Library;
use zernel_softgpu::config;
use zernel_softgpu::install::{Prologue, install};
use zernel_softgpu::truth::TruthLog;

const ROLE: &str = "ZERNEL_TARGET_ROLE";
const LIBRARIES: &str = "ZERNEL_TARGET_LIBRARIES";
const ROUNDS: &str = "ZERNEL_TARGET_ROUNDS";

/// What a target does after it was told to go.
pub(crate) type Role = fn(&Driver, u64);

/// If this process is a target: be it.
pub(crate) fn act(roles: &[(&str, Role)]) -> Option<ExitCode> {
    let wanted = env::var(ROLE).ok()?;
    let (_, role) = roles.iter().find(|(name, _)| *name == wanted)?;
    let rounds = env::var(ROUNDS).ok()?.parse().ok()?;
    let directory = PathBuf::from(env::var_os(LIBRARIES)?);
    wait_for_line();
    let driver = Driver::load(&directory);
    role(&driver, rounds);
    println!("done");
    wait_for_line();
    Some(ExitCode::SUCCESS)
}

fn wait_for_line() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a pipe");
}

/// The software GPU in a directory of its own, with a log of what really happened.
pub(crate) struct Stage {
    directory: tempfile::TempDir,
}

impl Stage {
    pub(crate) fn new(prologue: Prologue) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        install(&directory.path().join("lib"), prologue).expect("the libraries are built");
        Self { directory }
    }

    pub(crate) fn library(&self, name: &str) -> PathBuf {
        self.directory.path().join("lib").join(name)
    }

    pub(crate) fn truth(&self) -> TruthLog {
        TruthLog::read(&self.directory.path().join("log")).expect("a readable log")
    }

    /// Starts a target, which waits to be told to go.
    pub(crate) fn target(&self, role: &str, rounds: u64) -> Target {
        let mut child = Command::new(env::current_exe().expect("we run"))
            .env(ROLE, role)
            .env(ROUNDS, rounds.to_string())
            .env(LIBRARIES, self.directory.path().join("lib"))
            .env(config::DIRECTORY, self.directory.path().join("node"))
            .env(config::DEVICES, "2")
            .env(config::LOG, self.directory.path().join("log"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program runs");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Target { child, output }
    }
}

/// A running target.
pub(crate) struct Target {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Target {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn tell(&mut self) {
        let input = self.child.stdin.as_mut().expect("piped");
        input.write_all(b"go\n").expect("the target listens");
    }

    pub(crate) fn go(&mut self) {
        self.tell();
    }

    /// Waits until it has done its work. It stays until it is dropped.
    pub(crate) fn wait_until_done(&mut self) {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the target speaks");
        assert_eq!(line, "done\n", "the target did not finish its work");
    }

    /// Lets it end.
    pub(crate) fn end(mut self) {
        self.tell();
        assert!(self.child.wait().expect("our child").success());
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The software GPU's libraries as a C program sees them.
pub(crate) struct Driver {
    cuda: Library,
    nccl: Library,
}

/// Calls an exported function with integer arguments; expects success.
macro_rules! call {
    ($library:expr, $name:literal $(, $argument:expr)*) => {{
        let result = try_call!($library, $name $(, $argument)*);
        assert_eq!(result, 0, $name);
    }};
}

/// The same; whatever it returns.
macro_rules! try_call {
    ($library:expr, $name:literal $(, $argument:expr)*) => {{
        // SAFETY: the software GPU's functions take integers and pointers, as the real ones do.
        unsafe {
            let function: libloading::Symbol<'_, unsafe extern "C" fn($(as_word!($argument)),*) -> i32> =
                $library.get(concat!($name, "\0").as_bytes()).expect($name);
            function($($argument as u64),*)
        }
    }};
}

macro_rules! as_word {
    ($argument:expr) => {
        u64
    };
}

pub(crate) use {as_word, call, try_call};

fn out<T>(value: &mut T) -> *mut c_void {
    ptr::from_mut(value).cast()
}

impl Driver {
    fn load(directory: &Path) -> Self {
        let open = |name: &str| {
            // SAFETY: loading the software GPU runs no code of its own.
            unsafe { Library::new(directory.join(name)) }.expect("the library is there")
        };
        Self {
            cuda: open("libcuda.so.1"),
            nccl: open("libnccl.so.2"),
        }
    }

    /// Opens the device and makes its context current.
    pub(crate) fn open(&self) {
        self.open_device(0);
    }

    /// The same with another device than the first.
    pub(crate) fn open_device(&self, device: u64) {
        let mut context = 0_u64;
        call!(self.cuda, "cuInit", 0);
        call!(
            self.cuda,
            "cuDevicePrimaryCtxRetain",
            out(&mut context),
            device
        );
        call!(self.cuda, "cuCtxSetCurrent", context);
    }

    pub(crate) fn kernel(&self) -> u64 {
        let image = CString::new("softgpu kernel nothing 1\n").expect("no zero inside");
        let name = CString::new("nothing").expect("no zero inside");
        let (mut module, mut function) = (0_u64, 0_u64);
        call!(
            self.cuda,
            "cuModuleLoadData",
            out(&mut module),
            image.as_ptr()
        );
        call!(
            self.cuda,
            "cuModuleGetFunction",
            out(&mut function),
            module,
            name.as_ptr()
        );
        function
    }

    pub(crate) fn launch(&self, function: u64) {
        call!(
            self.cuda,
            "cuLaunchKernel",
            function,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            0,
            0,
            0
        );
    }

    pub(crate) fn copy_to(&self, device: u64, batch: &mut [u8]) {
        let bytes = batch.len();
        call!(
            self.cuda,
            "cuMemcpyHtoD_v2",
            device,
            batch.as_mut_ptr(),
            bytes
        );
    }

    pub(crate) fn synchronize(&self) {
        call!(self.cuda, "cuStreamSynchronize", 0);
    }

    pub(crate) fn allocate(&self, bytes: u64) -> u64 {
        let mut address = 0_u64;
        call!(self.cuda, "cuMemAlloc_v2", out(&mut address), bytes);
        address
    }

    pub(crate) fn free(&self, address: u64) {
        call!(self.cuda, "cuMemFree_v2", address);
    }

    pub(crate) fn cuda(&self) -> &Library {
        &self.cuda
    }

    pub(crate) fn nccl(&self) -> &Library {
        &self.nccl
    }
}

/// Uses every kind of call once a round, some of them so that they fail.
pub(crate) fn everything(driver: &Driver, rounds: u64) {
    driver.open();
    let function = driver.kernel();
    let cuda = driver.cuda();
    let mut host = vec![0_u8; 1 << 16];
    let mut random = fastrand::Rng::with_seed(u64::from(std::process::id()));
    for _ in 0..rounds {
        let bytes = random.u64(1..1 << 16);
        let (mut first, mut second, mut third, mut pitch) = (0_u64, 0_u64, 0_u64, 0_u64);
        let device = driver.allocate(bytes);
        call!(cuda, "cuMemAllocAsync", out(&mut first), bytes, 0);
        call!(cuda, "cuMemAllocManaged", out(&mut second), bytes, 1);
        call!(
            cuda,
            "cuMemAllocPitch_v2",
            out(&mut third),
            out(&mut pitch),
            100,
            7,
            4
        );
        try_call!(cuda, "cuMemAlloc_v2", out(&mut pitch), 1_u64 << 60);
        try_call!(cuda, "cuMemFree_v2", 12345);
        call!(cuda, "cuMemcpyHtoD_v2", device, host.as_mut_ptr(), bytes);
        call!(cuda, "cuMemcpyDtoH_v2", host.as_mut_ptr(), device, bytes);
        call!(
            cuda,
            "cuMemcpyHtoDAsync_v2",
            device,
            host.as_mut_ptr(),
            bytes / 2,
            0
        );
        call!(cuda, "cuMemcpyDtoDAsync_v2", device, second, bytes / 3, 0);
        driver.launch(function);
        driver.launch(function);
        call!(cuda, "cuStreamSynchronize", 0);
        call!(cuda, "cuCtxSynchronize");
        driver.free(device);
        call!(cuda, "cuMemFreeAsync", first, 0);
        driver.free(second);
        driver.free(third);
    }
    driver.allocate(4096);
}

/// Nothing but launches.
pub(crate) fn launches(driver: &Driver, rounds: u64) {
    driver.open();
    let function = driver.kernel();
    for _ in 0..rounds {
        driver.launch(function);
    }
    call!(driver.cuda(), "cuCtxSynchronize");
}

/// The software GPU leaves its node behind when a process is killed.
pub(crate) fn exists(path: &Path) -> bool {
    fs::exists(path).unwrap_or(false)
}
