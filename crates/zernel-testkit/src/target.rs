//! Targets: processes on the software GPU that a test observes. A test starts its own program again, and the
//! environment names the role that the new process runs. The target waits for the test, calls the software GPU's
//! libraries, and reports that it is done. The truth log contains all calls of the target.

use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use std::{env, ptr};

use libloading::Library;
use zernel_softgpu::config;
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_softgpu::truth::TruthLog;

/// The variable that names the role of a target.
pub const ROLE_VARIABLE: &str = "ZERNEL_TARGET_ROLE";
/// The variable with the number of rounds of a target.
pub const ROUNDS_VARIABLE: &str = "ZERNEL_TARGET_ROUNDS";
/// The variable that names the directory of the software GPU's libraries.
pub const LIBRARIES_VARIABLE: &str = "ZERNEL_TARGET_LIBRARIES";
/// The variable that names the directory of the stage, which its targets share.
const DIRECTORY_VARIABLE: &str = "ZERNEL_TARGET_DIRECTORY";

/// The function that a target runs; its second argument is the number of rounds.
pub type TargetRole = fn(&Driver, u64);

/// Runs the role that the environment names. Returns `None` if this process is no target.
pub fn run_role(roles: &[(&str, TargetRole)]) -> Option<ExitCode> {
    let wanted = env::var(ROLE_VARIABLE).ok()?;
    let (_, role) = roles.iter().find(|(name, _)| *name == wanted)?;
    let rounds = env::var(ROUNDS_VARIABLE).ok()?.parse().ok()?;
    let directory = PathBuf::from(env::var_os(LIBRARIES_VARIABLE)?);
    wait_for_line_on_stdin();
    let driver = Driver::load(&directory);
    role(&driver, rounds);
    println!("done");
    wait_for_line_on_stdin();
    Some(ExitCode::SUCCESS)
}

fn wait_for_line_on_stdin() {
    let input = std::io::stdin().as_fd().try_clone_to_owned();
    // The line is read byte by byte: the rest of the input is for the program that this process may exec.
    let mut input = File::from(input.expect("a pipe"));
    let mut byte = [0];
    while byte != *b"\n" && input.read(&mut byte).expect("a pipe") > 0 {}
}

/// In a target: reports that a part of the work is done, and waits until the test starts the next part.
pub fn end_part_and_wait() {
    println!("done");
    wait_for_line_on_stdin();
}

/// In a target: the directory of the stage, which all targets of the stage share.
pub fn stage_directory() -> PathBuf {
    PathBuf::from(env::var_os(DIRECTORY_VARIABLE).expect("a target has a stage"))
}

/// A lock held by all tests with targets. A test whose targets would change the sampling of other tests holds it
/// exclusively: an observer observes the whole machine.
static MACHINE_LOCK: RwLock<()> = RwLock::new(());

#[allow(dead_code)] // held, not read
enum MachineLockGuard {
    Shared(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

/// The directory of one test: the software GPU's libraries, and the truth log of the test's targets. A test has one
/// stage at a time.
pub struct Stage {
    directory: tempfile::TempDir,
    _lock_guard: MachineLockGuard,
}

impl Stage {
    /// Creates a stage. Other tests may have stages at the same time.
    pub fn new(prologue: Prologue) -> Self {
        let guard = MACHINE_LOCK.read().unwrap_or_else(PoisonError::into_inner);
        Self::with_lock_guard(prologue, MachineLockGuard::Shared(guard))
    }

    /// Creates a stage when no other test has one, and keeps other tests waiting until it is dropped.
    pub fn with_machine_alone(prologue: Prologue) -> Self {
        let guard = MACHINE_LOCK.write().unwrap_or_else(PoisonError::into_inner);
        Self::with_lock_guard(prologue, MachineLockGuard::Alone(guard))
    }

    fn with_lock_guard(prologue: Prologue, claim: MachineLockGuard) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        install_libraries(&directory.path().join("lib"), prologue)
            .expect("the libraries are built");
        Self {
            directory,
            _lock_guard: claim,
        }
    }

    /// The directory of the stage.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The path of a library of the stage, such as `libcuda.so.1`.
    pub fn library_path(&self, name: &str) -> PathBuf {
        self.path().join("lib").join(name)
    }

    /// Reads the truth log of all targets that ran so far.
    pub fn read_truth_log(&self) -> TruthLog {
        TruthLog::read(&self.path().join("log")).expect("a readable log")
    }

    /// Starts a target, which waits for [`Target::start_part`].
    pub fn start_target(&self, role: &str, rounds: u64) -> Target {
        Target::start(&mut self.target_command(role, rounds))
    }

    /// The command that starts a target.
    pub fn target_command(&self, role: &str, rounds: u64) -> Command {
        let program = env::current_exe().expect("we run");
        self.target_command_of(&program, role, rounds)
    }

    /// The command that starts a target by running `program`: a copy of this program, or a program that execs this one.
    pub fn target_command_of(&self, program: &Path, role: &str, rounds: u64) -> Command {
        let mut command = Command::new(program);
        command
            .env(ROLE_VARIABLE, role)
            .env(ROUNDS_VARIABLE, rounds.to_string())
            .env(LIBRARIES_VARIABLE, self.path().join("lib"))
            .env(DIRECTORY_VARIABLE, self.path())
            .env(config::DIRECTORY_VARIABLE, self.path().join("node"))
            .env(config::DEVICES_VARIABLE, "2")
            .env(config::LOG_VARIABLE, self.path().join("log"));
        command
    }
}

/// A running target process. It is killed on drop.
pub struct Target {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Target {
    /// Starts a target by a command that [`Stage::target_command`] returned.
    pub fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this program runs");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, output }
    }

    /// Pid of the target.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Starts the target's work, or the next part of it.
    pub fn start_part(&mut self) {
        let input = self.child.stdin.as_mut().expect("piped");
        input.write_all(b"go\n").expect("the target listens");
    }

    /// Waits until the target reports that its work is done. The process keeps running until this value is dropped.
    pub fn wait_until_done(&mut self) {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the target speaks");
        assert_eq!(line, "done\n", "the target did not finish its work");
    }

    /// Starts the next part of the target's work, and waits until that part is done.
    pub fn run_part(&mut self) {
        self.start_part();
        self.wait_until_done();
    }

    /// Lets the target exit, and waits until it has exited.
    pub fn let_exit(mut self) {
        self.start_part();
        assert!(self.wait_for_exit().success());
    }

    /// Kills the target, and waits until it has exited.
    pub fn kill(mut self) {
        self.child.kill().expect("our child");
        self.wait_for_exit();
    }

    fn wait_for_exit(&mut self) -> ExitStatus {
        self.child.wait().expect("our child")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The software GPU's libraries as a C program sees them.
pub struct Driver {
    cuda: Library,
    nccl: Library,
}

/// Calls an exported function with integer arguments. Panics unless it returns 0.
#[macro_export]
macro_rules! call {
    ($library:expr, $name:literal $(, $argument:expr)*) => {{
        let result = $crate::try_call!($library, $name $(, $argument)*);
        assert_eq!(result, 0, $name);
    }};
}

/// Calls an exported function with integer arguments, and returns its result.
#[macro_export]
macro_rules! try_call {
    ($library:expr, $name:literal $(, $argument:expr)*) => {{
        type Function = extern "C" fn($($crate::as_word!($argument)),*) -> i32;
        let library: &$crate::libloading::Library = &$library;
        let name = concat!($name, "\0").as_bytes();
        // SAFETY: the software GPU's functions take integers and pointers, as the real ones do.
        let function = unsafe { library.get::<Function>(name) }.expect($name);
        function($($argument as u64),*)
    }};
}

#[doc(hidden)]
#[macro_export]
macro_rules! as_word {
    ($argument:expr) => {
        u64
    };
}

pub use crate::{call, try_call};

/// The address of a value, as the place where a function stores its result.
pub fn out_pointer<T>(value: &mut T) -> *mut c_void {
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

    /// Opens the first device and makes its primary context current.
    pub fn open_first_device(&self) {
        self.open_device(0);
    }

    /// Opens the device with this number and makes its primary context current.
    pub fn open_device(&self, device: u64) {
        let mut context = 0_u64;
        call!(self.cuda, "cuInit", 0);
        call!(
            self.cuda,
            "cuDevicePrimaryCtxRetain",
            out_pointer(&mut context),
            device
        );
        call!(self.cuda, "cuCtxSetCurrent", context);
    }

    /// Loads a kernel that takes no time, and returns its handle.
    pub fn load_empty_kernel(&self) -> u64 {
        self.load_kernel("nothing", Duration::from_nanos(1))
    }

    /// Loads a kernel that takes the given time, and returns its handle.
    pub fn load_kernel(&self, name: &str, time: Duration) -> u64 {
        let image = format!("softgpu kernel {name} {}\n", time.as_nanos());
        let image = CString::new(image).expect("no zero inside");
        let name = CString::new(name).expect("no zero inside");
        let (mut module, mut function) = (0_u64, 0_u64);
        call!(
            self.cuda,
            "cuModuleLoadData",
            out_pointer(&mut module),
            image.as_ptr()
        );
        call!(
            self.cuda,
            "cuModuleGetFunction",
            out_pointer(&mut function),
            module,
            name.as_ptr()
        );
        function
    }

    /// Calls `cuLaunchKernel` on the default stream.
    pub fn launch_kernel(&self, function: u64) {
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

    /// Calls `cuLaunchCooperativeKernel` on the default stream.
    pub fn launch_cooperatively(&self, function: u64) {
        call!(
            self.cuda,
            "cuLaunchCooperativeKernel",
            function,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            0,
            0
        );
    }

    /// Copies a batch to an address on the device.
    pub fn copy_to_device(&self, device: u64, batch: &mut [u8]) {
        let bytes = batch.len();
        call!(
            self.cuda,
            "cuMemcpyHtoD_v2",
            device,
            batch.as_mut_ptr(),
            bytes
        );
    }

    /// Waits until all work in the default stream is done.
    pub fn synchronize(&self) {
        call!(self.cuda, "cuStreamSynchronize", 0);
    }

    /// Allocates memory on the device, and returns its address.
    pub fn allocate_memory(&self, bytes: u64) -> u64 {
        let mut address = 0_u64;
        call!(self.cuda, "cuMemAlloc_v2", out_pointer(&mut address), bytes);
        address
    }

    /// Frees the memory that [`Self::allocate_memory`] returned.
    pub fn free_memory(&self, address: u64) {
        call!(self.cuda, "cuMemFree_v2", address);
    }

    /// The loaded `libcuda.so.1`.
    pub fn cuda(&self) -> &Library {
        &self.cuda
    }

    /// The loaded `libnccl.so.2`.
    pub fn nccl(&self) -> &Library {
        &self.nccl
    }
}
