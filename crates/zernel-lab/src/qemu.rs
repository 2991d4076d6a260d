//! The QEMU process of a run: its arguments, its start and its end.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::deterministic::DeterministicSettings;
use crate::guest;
use crate::program_search::find_program;
use crate::vm::{Accelerator, VmError, VmSpec};

pub(crate) const QEMU_PROGRAM: &str = "qemu-system-x86_64";
/// Environment variables that name another QEMU, and the folder of that QEMU's firmware.
const QEMU_VARIABLE: &str = "ZERNEL_QEMU";
const FIRMWARE_VARIABLE: &str = "ZERNEL_QEMU_FIRMWARE";
/// The name of a program that starts another one, which the kernel kills when its parent dies.
const SETPRIV_PROGRAM: &str = "setpriv";

/// Names of files in the folder of a run.
pub(crate) const CONSOLE_FILE: &str = "console";
pub(crate) const INITRAMFS_FILE: &str = "initramfs";
pub(crate) const QEMU_LOG_FILE: &str = "qemu.log";
const QEMU_THREADS_LIBRARY_FILE: &str = "qemu_threads.so";
/// This file is created by the library of a deterministic run: `LOADED_FILE` in `qemu_threads.c`.
pub(crate) const QEMU_THREADS_LOADED_FILE: &str = "qemu_threads.used";

/// The library that decides which of QEMU's threads runs in a deterministic run.
const QEMU_THREADS_LIBRARY_BYTES: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/qemu_threads.so"));

/// The beginning of QEMU's message when KVM fails. QEMU then stops the guest and does not exit.
const KVM_FAILURE_MESSAGE: &str = "KVM internal error";

/// The paths of the programs that a run needs besides busybox.
#[derive(Debug)]
pub(crate) struct QemuPrograms {
    qemu: PathBuf,
    setpriv: PathBuf,
}

impl QemuPrograms {
    pub(crate) fn find() -> Result<Self, VmError> {
        let qemu = find_qemu().ok_or(VmError::QemuMissing)?;
        let setpriv = find_program(SETPRIV_PROGRAM).ok_or(VmError::SetprivMissing)?;
        Ok(Self { qemu, setpriv })
    }
}

/// The path of QEMU: `$ZERNEL_QEMU`, else found on `PATH`.
pub(crate) fn find_qemu() -> Option<PathBuf> {
    match nonempty_variable(QEMU_VARIABLE) {
        Some(named) => std::path::absolute(named)
            .ok()
            .filter(|path| path.is_file()),
        None => find_program(QEMU_PROGRAM),
    }
}

/// The value of an environment variable; `None` if it is not set or empty.
fn nonempty_variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// A running QEMU process. Dropping this value kills and reaps the process.
#[derive(Debug)]
pub(crate) struct QemuProcess {
    child: Child,
}

impl QemuProcess {
    /// Starts QEMU in `folder`, which contains all files of the run.
    pub(crate) fn start(
        programs: &QemuPrograms,
        arguments: &[OsString],
        folder: &Path,
        is_deterministic: bool,
    ) -> io::Result<Self> {
        let log = File::create(folder.join(QEMU_LOG_FILE))?;
        let mut command = Command::new(&programs.setpriv);
        command.args(["--pdeathsig", "KILL", "--"]);
        command.arg(&programs.qemu);
        // The option with QEMU's firmware folder is added here. It is not among the arguments that identify a result,
        // because no result depends on it.
        if let Some(firmware) = nonempty_variable(FIRMWARE_VARIABLE) {
            command.arg("-L").arg(std::path::absolute(firmware)?);
        }
        if is_deterministic {
            fs::write(
                folder.join(QEMU_THREADS_LIBRARY_FILE),
                QEMU_THREADS_LIBRARY_BYTES,
            )?;
            command.env("LD_PRELOAD", format!("./{QEMU_THREADS_LIBRARY_FILE}"));
        }
        let child = command
            .args(arguments)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        Ok(Self { child })
    }

    /// The exit status of QEMU; `None` while it runs.
    pub(crate) fn exit_status(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }
}

impl Drop for QemuProcess {
    fn drop(&mut self) {
        // The kill and the wait fail only if QEMU has already ended and been reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether QEMU's error output says that KVM cannot run this guest.
pub(crate) fn kvm_failed(log: &str) -> bool {
    log.contains(KVM_FAILURE_MESSAGE)
}

/// Whether this user may use KVM. KVM may still fail to run a guest.
pub(crate) fn can_open_kvm() -> bool {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok()
}

/// The arguments of QEMU. Paths in them are relative to the folder of the run.
pub(crate) fn qemu_arguments(
    spec: &VmSpec,
    accelerator: Accelerator,
    ports: guest::GuestPorts,
) -> Vec<OsString> {
    let (accelerator, cpu) = match accelerator {
        Accelerator::Kvm => ("kvm".to_owned(), "host".to_owned()),
        Accelerator::Tcg | Accelerator::Auto => (tcg_accelerator_option(spec), emulated_cpu(spec)),
    };
    let mut arguments: Vec<OsString> = ["-nodefaults", "-no-user-config", "-no-reboot"]
        .map(OsString::from)
        .into();
    let mut add_option =
        |name: &str, value: OsString| arguments.extend([OsString::from(name), value]);
    add_option("-display", "none".into());
    add_option("-machine", "q35".into());
    add_option("-accel", accelerator.into());
    add_option("-cpu", cpu.into());
    for (name, value) in spec.topology.qemu_options(spec.memory_mib) {
        add_option(name, value.into());
    }
    for (name, value) in spec
        .deterministic_settings
        .iter()
        .flat_map(DeterministicSettings::qemu_options)
    {
        add_option(name, value.into());
    }
    add_option("-m", format!("{}M", spec.memory_mib).into());
    add_option("-kernel", spec.kernel.image_path.clone().into());
    add_option("-initrd", INITRAMFS_FILE.into());
    add_option("-append", kernel_command_line(spec).into());
    add_option(
        "-chardev",
        format!("file,id={CONSOLE_FILE},path={CONSOLE_FILE}").into(),
    );
    add_option("-serial", format!("chardev:{CONSOLE_FILE}").into());
    arguments.extend(ports.qemu_arguments(spec.deterministic_settings.is_some()));
    arguments
}

/// The emulator: one thread for all processors. With several, QEMU 7.2 loses the race when the guest patches its code.
///
/// A vCPU whose code no longer fits into the memory for translated code loses its turn. QEMU takes an eighth of the host's
/// memory for it, 1 GiB at most; a deterministic run takes 1 GiB on every host, of which a boot fills 0.1 GiB.
fn tcg_accelerator_option(spec: &VmSpec) -> String {
    let mut option = "tcg,thread=single".to_owned();
    if spec.deterministic_settings.is_some() {
        option += ",tb-size=1024";
    }
    option
}

/// The first kernel series whose BPF programs can allocate memory only on a CPU with cmpxchg16b.
const FIRST_KERNEL_THAT_NEEDS_CMPXCHG16B: [u32; 2] = [6, 18];

/// The model of the emulated CPU: all features, but without cmpxchg16b for kernels that do not need this instruction.
/// After cmpxchg16b, QEMU 7.2 sometimes leaves an invalid value in the flags register, and Linux 6.12 crashes.
///
/// A deterministic guest gets no random numbers from the host.
fn emulated_cpu(spec: &VmSpec) -> String {
    let mut cpu = "max".to_owned();
    if spec.kernel.version.numbers() < FIRST_KERNEL_THAT_NEEDS_CMPXCHG16B.as_slice() {
        cpu += ",-cx16";
    }
    if spec.deterministic_settings.is_some() {
        cpu += ",-rdrand,-rdseed";
    }
    cpu
}

/// The kernel's command line. A kernel panic or oops ends the run at once. Addresses are the same in every boot.
/// Self-tests and the clock watchdog, which only cost time in an emulator, are off. The caller's words come last and
/// override all others.
fn kernel_command_line(spec: &VmSpec) -> String {
    let mut words = format!(
        "console=ttyS0 rdinit={} panic=-1 oops=panic nokaslr norandmaps tsc=reliable cryptomgr.notests=1",
        guest::INIT_PATH
    );
    let settings = spec.deterministic_settings.iter();
    let fixed = settings.flat_map(DeterministicSettings::kernel_arguments);
    for word in fixed {
        words.push(' ');
        words.push_str(word);
    }
    let settings = spec.deterministic_settings.iter();
    let delay = settings.filter_map(DeterministicSettings::boot_delay_argument);
    for word in delay.chain(spec.kernel_arguments.iter().cloned()) {
        words.push(' ');
        words.push_str(&word);
    }
    words
}
