//! The guest's side of a run: the script that runs as the guest's first process, and its messages to the host.
//!
//! The script uses three ports: the command's stdout, its stderr, and a status port. On the status port it
//! writes `ready` when it starts the command, and `done …` when the command has ended and all its output is
//! written.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::deterministic::DeterministicSettings;
use crate::entropy_program;
use crate::initramfs::{Initramfs, InitramfsError};
use crate::kernel::Kernel;
use crate::program_dependencies;
use crate::program_search::find_program;
use crate::vm::{CommandStatus, VmError};

/// Path of the guest's first process, as named on the kernel's command line.
pub(crate) const INIT_PATH: &str = "/zernel/init";
const BUSYBOX_PATH: &str = "/zernel/busybox";
/// Path of the program that credits the guest's kernel with the seed's random bytes.
const ENTROPY_PROGRAM_PATH: &str = "/zernel/entropy";

/// Files in the run's folder on the host, one for each port of the guest.
pub(crate) const STDOUT_FILE: &str = "stdout";
pub(crate) const STDERR_FILE: &str = "stderr";
pub(crate) const STATUS_FILE: &str = "status";

/// The ports that carry bytes from the guest to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GuestPorts {
    /// Virtio ports are fast, but the driver must be built into the kernel, because the guest has no modules.
    Virtio,
    /// Four PC serial ports; the first one is the console. They carry half a megabyte per second, and every kernel has
    /// the driver.
    Serial,
}

impl GuestPorts {
    /// The fastest ports that a kernel can use without modules.
    pub(crate) fn fastest_for_kernel(kernel: &Kernel) -> Self {
        let has_virtio = ["CONFIG_VIRTIO_PCI", "CONFIG_VIRTIO_CONSOLE"]
            .iter()
            .all(|option| kernel.has_option(option));
        if has_virtio {
            Self::Virtio
        } else {
            Self::Serial
        }
    }

    /// Arguments with which QEMU writes each port of the guest to a file in QEMU's working folder.
    ///
    /// A deterministic run has no event descriptor: with one, another host thread would carry the bytes, at a time that
    /// does not depend on the guest's clock.
    pub(crate) fn qemu_arguments(self, is_deterministic: bool) -> Vec<OsString> {
        let mut arguments = Vec::new();
        if self == Self::Virtio {
            let device = match is_deterministic {
                true => "virtio-serial-pci,ioeventfd=off",
                false => "virtio-serial-pci",
            };
            arguments.extend(["-device".to_owned(), device.to_owned()]);
        }
        for (index, name) in [STDOUT_FILE, STDERR_FILE, STATUS_FILE].iter().enumerate() {
            let number = index + 1;
            arguments.extend(["-chardev".to_owned(), format!("file,id={name},path={name}")]);
            arguments.extend(match self {
                Self::Virtio => [
                    "-device".to_owned(),
                    format!("virtserialport,nr={number},chardev={name},name={name}"),
                ],
                Self::Serial => ["-serial".to_owned(), format!("chardev:{name}")],
            });
        }
        arguments.into_iter().map(OsString::from).collect()
    }

    /// The path of port 1, 2 or 3 in the guest, without the number.
    fn device_path_prefix(self) -> &'static str {
        match self {
            Self::Virtio => "/dev/vport0p",
            Self::Serial => "/dev/ttyS",
        }
    }
}

/// The command that runs in the guest, with its environment.
#[derive(Debug)]
pub(crate) struct GuestCommand<'a> {
    pub(crate) program: &'a OsStr,
    pub(crate) arguments: &'a [OsString],
    pub(crate) environment: &'a [(String, OsString)],
    pub(crate) deterministic_settings: Option<&'a DeterministicSettings>,
}

/// The statically linked busybox that runs the guest's first process.
pub(crate) fn find_busybox() -> Result<PathBuf, VmError> {
    let path = find_program("busybox").ok_or(VmError::BusyboxMissing)?;
    match program_dependencies::dynamic_loader(&path) {
        Ok(None) => Ok(path),
        Ok(Some(_)) => Err(VmError::BusyboxNotStatic { path }),
        Err(error) => Err(InitramfsError::from(error).into()),
    }
}

/// Adds the first process to the guest's files, and what programs expect of any Linux system.
pub(crate) fn add_base_system(
    initramfs: &mut Initramfs,
    kernel: &Kernel,
    script: Vec<u8>,
) -> Result<(), VmError> {
    initramfs.add_host_file(find_busybox()?, BUSYBOX_PATH)?;
    initramfs.add_file_with_content(INIT_PATH, script, 0o755)?;
    for folder in ["/dev", "/proc", "/root", "/run", "/sys"] {
        initramfs.add_directory(folder, 0o755)?;
    }
    initramfs.add_directory("/tmp", 0o1777)?;
    if !initramfs.contains_path("/bin/sh") {
        initramfs.add_symlink("/bin/sh", BUSYBOX_PATH)?;
    }
    if let Some(config) = &kernel.config_path {
        initramfs.add_host_file(
            config,
            Path::new("/boot").join(format!("config-{}", kernel.version)),
        )?;
    }
    Ok(())
}

/// Adds the program that a deterministic guest's first process calls to credit entropy.
pub(crate) fn add_entropy_program(
    initramfs: &mut Initramfs,
    settings: &DeterministicSettings,
) -> Result<(), VmError> {
    let program = entropy_program::build_executable(&settings.entropy());
    Ok(initramfs.add_file_with_content(ENTROPY_PROGRAM_PATH, program, 0o755)?)
}

/// The script that the guest's first process runs.
///
/// The command writes to pipes, as under any shell, and `cat` copies the bytes to a port: a virtio port takes only part
/// of a large write and can be opened only once, which programs do not expect of their stdout. `time` distinguishes an
/// exit code from a signal; a shell's `$?` does not. Processes that the command leaves running are killed before the
/// script waits for the pipes, because a daemon would hold them open for ever.
pub(crate) fn init_script(
    command: &GuestCommand<'_>,
    ports: GuestPorts,
) -> Result<Vec<u8>, VmError> {
    let mut script = Vec::new();
    let mut add_line = |words: &[&[u8]]| {
        script.extend_from_slice(&words.concat());
        script.push(b'\n');
    };
    add_line(&[GUEST_SETUP_SCRIPT.as_bytes()]);
    add_line(&[b"port=", ports.device_path_prefix().as_bytes()]);
    if ports == GuestPorts::Serial {
        add_line(&[b"for number in 1 2 3; do $busybox stty -F $port$number raw -echo; done"]);
    }
    for (name, value) in command.environment {
        add_line(&[
            b"export ",
            check_variable_name(name)?,
            b"=",
            &quote_for_shell(value)?,
        ]);
    }
    let mut words = quote_for_shell(command.program)?;
    for argument in command.arguments {
        words.push(b' ');
        words.extend(quote_for_shell(argument)?);
    }
    add_line(&[
        b"run() { exec $busybox time -o /run/how -f ok $busybox setsid ",
        &words,
        b"; }",
    ]);
    add_line(&[shell_hooks_around_command(command.deterministic_settings).as_bytes()]);
    add_line(&[GUEST_COMMAND_SCRIPT.as_bytes()]);
    Ok(script)
}

/// Two functions of the script: what runs right before the command, and what runs right after it.
fn shell_hooks_around_command(settings: Option<&DeterministicSettings>) -> String {
    let Some(settings) = settings else {
        return "before() { :; }\nafter() { :; }".to_owned();
    };
    let limit_us = settings.virtual_time_limit.as_micros();
    let delay_us = settings.command_start_delay().as_micros();
    format!(
        "before() {{
    {ENTROPY_PROGRAM_PATH}
    {{ $busybox usleep {limit_us}; echo {VIRTUAL_TIME_LIMIT_LINE} >&3; $busybox poweroff -f; }} </dev/null >/dev/null 2>&1 &
    $busybox usleep {delay_us}
}}
after() {{
    $busybox sed -n 's/^now at \\([0-9]*\\) nsecs/{VIRTUAL_TIME_LINE_PREFIX}\\1/p' /proc/timer_list >&3
    $busybox sed 's/^/state /' /proc/stat /proc/interrupts /proc/schedstat >&3
}}"
    )
}

/// Beginnings of lines on the status port of a deterministic guest: the limit of virtual time was reached, and the time
/// at the end of the command.
const VIRTUAL_TIME_LIMIT_LINE: &str = "limit";
const VIRTUAL_TIME_LINE_PREFIX: &str = "time ";

const GUEST_SETUP_SCRIPT: &str = "#!/zernel/busybox sh
busybox=/zernel/busybox
$busybox mount -t proc proc /proc
$busybox mount -t sysfs sysfs /sys
$busybox mount -t devtmpfs devtmpfs /dev
$busybox mkdir -p /dev/pts /dev/shm
$busybox mount -t devpts devpts /dev/pts
$busybox mount -t tmpfs -o mode=1777 tmpfs /dev/shm
$busybox mount -t cgroup2 cgroup2 /sys/fs/cgroup
$busybox mount -t bpf bpf /sys/fs/bpf
$busybox mount -t tracefs tracefs /sys/kernel/tracing
$busybox mount -t debugfs debugfs /sys/kernel/debug
$busybox ln -s /proc/self/fd /dev/fd
$busybox ln -s /proc/self/fd/0 /dev/stdin
$busybox ln -s /proc/self/fd/1 /dev/stdout
$busybox ln -s /proc/self/fd/2 /dev/stderr
$busybox ip link set lo up
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb";

const GUEST_COMMAND_SCRIPT: &str = r#"exec 3>${port}3
$busybox mkfifo /run/stdout /run/stderr
$busybox cat </run/stdout >${port}1 3>&- &
stdout=$!
$busybox cat </run/stderr >${port}2 3>&- &
stderr=$!
before
echo ready >&3
(run) </dev/null >/run/stdout 2>/run/stderr 3>&-
code=$?
for process in /proc/[0-9]*; do
    case " 1 $stdout $stderr " in
        *" ${process#/proc/} "*) ;;
        *) kill -9 ${process#/proc/} 2>/dev/null ;;
    esac
done
wait $stdout $stderr
how=
read -r how 2>/dev/null </run/how
after
echo "done $code $how" >&3
$busybox poweroff -f"#;

/// Quotes bytes as one word of a shell script that means exactly these bytes.
fn quote_for_shell(word: &OsStr) -> Result<Vec<u8>, VmError> {
    if word.as_bytes().contains(&0) {
        return Err(VmError::BadArgumentOrVariableName {
            word: word.to_owned(),
        });
    }
    let mut quoted = vec![b'\''];
    for &byte in word.as_bytes() {
        match byte {
            b'\'' => quoted.extend_from_slice(br"'\''"),
            _ => quoted.push(byte),
        }
    }
    quoted.push(b'\'');
    Ok(quoted)
}

fn check_variable_name(name: &str) -> Result<&[u8], VmError> {
    let has_only_valid_bytes = name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if has_only_valid_bytes
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && !name.is_empty()
    {
        Ok(name.as_bytes())
    } else {
        Err(VmError::BadArgumentOrVariableName { word: name.into() })
    }
}

/// How far the guest has come, by the lines that it has written to the status port so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GuestProgress {
    Booting,
    Running,
    VirtualTimeLimitReached,
    CommandEnded(CommandStatus),
}

impl GuestProgress {
    pub(crate) fn parse_status(status: &str) -> Self {
        // A line without a line break may not be complete yet.
        let complete_lines = status.rfind('\n').map_or("", |end| &status[..end]);
        let ended_line = complete_lines
            .lines()
            .find_map(|line| line.strip_prefix("done "));
        match ended_line.and_then(parse_command_status) {
            Some(status) => Self::CommandEnded(status),
            None if complete_lines
                .lines()
                .any(|line| line == VIRTUAL_TIME_LIMIT_LINE) =>
            {
                Self::VirtualTimeLimitReached
            }
            None if complete_lines.lines().any(|line| line == "ready") => Self::Running,
            None => Self::Booting,
        }
    }
}

/// The time since boot that a deterministic guest wrote to the status port at the command's end.
pub(crate) fn virtual_time_in_status(status: &str) -> Option<Duration> {
    let nanoseconds = status
        .lines()
        .find_map(|line| line.strip_prefix(VIRTUAL_TIME_LINE_PREFIX))?;
    nanoseconds.parse().ok().map(Duration::from_nanos)
}

/// Reads the shell's exit code and the first line that `time` wrote. If `time` wrote nothing, it was killed together
/// with the command.
fn parse_command_status(line: &str) -> Option<CommandStatus> {
    let (code, how) = line.split_once(' ')?;
    let code: i32 = code.parse().ok()?;
    if let Some(signal) = how.strip_prefix("Command terminated by signal ") {
        return Some(CommandStatus::Killed {
            signal: signal.trim().parse().ok()?,
        });
    }
    if how.is_empty() && code > 128 {
        return Some(CommandStatus::Killed { signal: code - 128 });
    }
    Some(CommandStatus::Exited(code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn quote_for_shell_round_trips_through_sh() {
        let words = [
            &b"plain"[..],
            b"",
            b"two words",
            b"it's",
            b"$HOME `ls` \\ \"",
            b"a\nb",
            b"\x80\xff\x81\x88'",
        ];
        for word in words.map(OsStr::from_bytes) {
            let mut script = b"printf %s ".to_vec();
            script.extend(quote_for_shell(word).unwrap());
            let output = Command::new("/bin/sh")
                .arg("-c")
                .arg(OsStr::from_bytes(&script))
                .output()
                .unwrap();
            assert_eq!(output.stdout, word.as_bytes());
        }
        assert!(quote_for_shell(OsStr::from_bytes(b"a\0b")).is_err());
    }

    #[test]
    fn invalid_variable_names_are_refused() {
        for name in ["RUST_LOG", "_x1"] {
            assert!(check_variable_name(name).is_ok(), "{name}");
        }
        for name in ["", "1x", "a-b", "a=b", "a b", "ä"] {
            assert!(check_variable_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn guest_progress_is_parsed_from_status_port() {
        use CommandStatus::{Exited, Killed};
        assert_eq!(GuestProgress::parse_status(""), GuestProgress::Booting);
        assert_eq!(GuestProgress::parse_status("read"), GuestProgress::Booting);
        assert_eq!(
            GuestProgress::parse_status("ready\n"),
            GuestProgress::Running
        );
        assert_eq!(
            GuestProgress::parse_status("ready\ndone 1"),
            GuestProgress::Running
        );
        assert_eq!(
            GuestProgress::parse_status("ready\ndone 0 ok\n"),
            GuestProgress::CommandEnded(Exited(0))
        );
        let line = "ready\ndone 137 Command exited with non-zero status 137\n";
        assert_eq!(
            GuestProgress::parse_status(line),
            GuestProgress::CommandEnded(Exited(137))
        );
        let line = "ready\ndone 9 Command terminated by signal 9\n";
        assert_eq!(
            GuestProgress::parse_status(line),
            GuestProgress::CommandEnded(Killed { signal: 9 })
        );
        assert_eq!(
            GuestProgress::parse_status("ready\ndone 137 \n"),
            GuestProgress::CommandEnded(Killed { signal: 9 })
        );
        assert_eq!(
            GuestProgress::parse_status("ready\ndone malformed\n"),
            GuestProgress::Running
        );
        assert_eq!(
            GuestProgress::parse_status("ready\nlimit\n"),
            GuestProgress::VirtualTimeLimitReached
        );
        assert_eq!(
            virtual_time_in_status("ready\ntime 1234567890\ndone 0 ok\n"),
            Some(Duration::new(1, 234_567_890))
        );
    }

    #[test]
    fn init_script_is_valid_shell() {
        let arguments = [OsString::from("-c"), OsString::from("echo 'a' && exit 7")];
        let environment = [("A".to_owned(), OsString::from("b c"))];
        let deterministic_settings = DeterministicSettings::new(1);
        for (ports, deterministic_settings) in [
            (GuestPorts::Virtio, None),
            (GuestPorts::Serial, None),
            (GuestPorts::Virtio, Some(&deterministic_settings)),
        ] {
            let command = GuestCommand {
                program: OsStr::new("/bin/sh"),
                arguments: &arguments,
                environment: &environment,
                deterministic_settings,
            };
            let script = init_script(&command, ports).unwrap();
            let status = Command::new("/bin/sh")
                .arg("-nc")
                .arg(OsStr::from_bytes(&script))
                .status()
                .unwrap();
            assert!(status.success(), "{}", String::from_utf8_lossy(&script));
        }
    }
}
