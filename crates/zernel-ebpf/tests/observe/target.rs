//! Programs to be observed: this test program again, told by its environment what to be.

use std::ffi::{CString, c_void};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::{env, ptr};

use libloading::Library;
use zernel_softgpu::config;
use zernel_softgpu::install::{Prologue, install};
use zernel_softgpu::truth::TruthLog;

/// What a target is to be.
pub(crate) const ROLE: &str = "ZERNEL_TARGET_ROLE";
/// How much of it.
pub(crate) const ROUNDS: &str = "ZERNEL_TARGET_ROUNDS";
/// Where it finds its libraries.
pub(crate) const LIBRARIES: &str = "ZERNEL_TARGET_LIBRARIES";
const DIRECTORY: &str = "ZERNEL_TARGET_DIRECTORY";

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
    let input = std::io::stdin().as_fd().try_clone_to_owned();
    // Byte by byte: what follows is for whoever is executed next.
    let mut input = File::from(input.expect("a pipe"));
    let mut byte = [0];
    while byte != *b"\n" && input.read(&mut byte).expect("a pipe") > 0 {}
}

/// Says that a part of the work is done, and waits to be told to go on.
pub(crate) fn pause() {
    println!("done");
    wait_for_line();
}

/// The directory of the target's stage, which all its targets share.
pub(crate) fn directory() -> PathBuf {
    PathBuf::from(env::var_os(DIRECTORY).expect("a target has a stage"))
}

/// An observer sees all of a machine, and what one target costs changes how others are watched.
static MACHINE: RwLock<()> = RwLock::new(());

#[allow(dead_code)] // held, not read
enum Claim {
    Shared(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

/// The software GPU in a directory of its own, with a log of what really happened. A test has one at
/// a time.
pub(crate) struct Stage {
    directory: tempfile::TempDir,
    _claim: Claim,
}

impl Stage {
    pub(crate) fn new(prologue: Prologue) -> Self {
        let guard = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
        Self::set(prologue, Claim::Shared(guard))
    }

    /// While no other test has one.
    pub(crate) fn alone(prologue: Prologue) -> Self {
        let guard = MACHINE.write().unwrap_or_else(PoisonError::into_inner);
        Self::set(prologue, Claim::Alone(guard))
    }

    fn set(prologue: Prologue, claim: Claim) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        install(&directory.path().join("lib"), prologue).expect("the libraries are built");
        Self {
            directory,
            _claim: claim,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn library(&self, name: &str) -> PathBuf {
        self.path().join("lib").join(name)
    }

    pub(crate) fn truth(&self) -> TruthLog {
        TruthLog::read(&self.path().join("log")).expect("a readable log")
    }

    /// Starts a target, which waits to be told to go.
    pub(crate) fn target(&self, role: &str, rounds: u64) -> Target {
        Target::start(&mut self.command(role, rounds))
    }

    /// What starts a target.
    pub(crate) fn command(&self, role: &str, rounds: u64) -> Command {
        let program = env::current_exe().expect("we run");
        self.command_of(&program, role, rounds)
    }

    /// The same with a copy of this program, or with something that becomes it.
    pub(crate) fn command_of(&self, program: &Path, role: &str, rounds: u64) -> Command {
        let mut command = Command::new(program);
        command
            .env(ROLE, role)
            .env(ROUNDS, rounds.to_string())
            .env(LIBRARIES, self.path().join("lib"))
            .env(DIRECTORY, self.path())
            .env(config::DIRECTORY, self.path().join("node"))
            .env(config::DEVICES, "2")
            .env(config::LOG, self.path().join("log"));
        command
    }
}

/// A running target.
pub(crate) struct Target {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Target {
    pub(crate) fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("this program runs");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, output }
    }

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

    /// Has it do the next part of its work.
    pub(crate) fn step(&mut self) {
        self.go();
        self.wait_until_done();
    }

    /// Lets it end, and waits until it has.
    pub(crate) fn end(mut self) {
        self.tell();
        assert!(self.wait().success());
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().expect("our child");
        self.wait();
    }

    fn wait(&mut self) -> ExitStatus {
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
pub(crate) struct Driver {
    cuda: Library,
    nccl: Library,
}

/// Calls an exported function with integer arguments; expects success.
macro_rules! call {
    ($library:expr, $name:literal $(, $argument:expr)*) => {{
        let result = $crate::target::try_call!($library, $name $(, $argument)*);
        assert_eq!(result, 0, $name);
    }};
}

/// The same; whatever it returns.
macro_rules! try_call {
    ($library:expr, $name:literal $(, $argument:expr)*) => {{
        // SAFETY: the software GPU's functions take integers and pointers, as the real ones do.
        unsafe {
            let function: libloading::Symbol<
                '_,
                unsafe extern "C" fn($($crate::target::as_word!($argument)),*) -> i32,
            > =
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

/// Where a function is to store something.
pub(crate) fn out<T>(value: &mut T) -> *mut c_void {
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

    pub(crate) fn launch_cooperatively(&self, function: u64) {
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
