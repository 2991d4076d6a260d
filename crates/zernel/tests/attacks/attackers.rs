//! What a second user does to the daemon. Each attack is a role: it prepares itself, reports that, and goes on until it is
//! killed.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{process, thread};

use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{
    Signal, WaitOptions, getpid, getppid, set_parent_process_death_signal, waitpid,
};
use zernel_ebpf::probes::{ProbedFunction, SYMBOLS};
use zernel_elf::LibraryKind;
use zernel_testkit::elf_builder::{ElfBuilder, ElfSymbol, global_function};
use zernel_testkit::libloading::Library;
use zernel_testkit::target::{
    self, Driver, TargetRole, call, end_part_and_wait, out_pointer, stage_directory,
};

pub(crate) const ATTACKER_ROLES: &[(&str, TargetRole)] = &[
    ("grows_loaders", target_grows_loaders),
    ("maps_huge_libraries", target_maps_huge_libraries),
    ("maps_dead_files", target_maps_dead_files),
    ("maps_copies", target_maps_copies),
    ("maps_full_copies", target_maps_full_copies),
    ("loops_cu_init", target_loops_cu_init),
    ("forks_and_exits", target_forks_and_exits),
    ("destroys_contexts", target_destroys_contexts),
    ("maps_refused_files", target_maps_refused_files),
    ("replaces_libraries", target_replaces_libraries),
    ("holds_connections", target_holds_connections),
    ("reads_slowly", target_reads_slowly),
    ("executes_programs", target_executes_programs),
    ("uses_a_library", target_uses_a_library),
    ("floods_requests", target_floods_requests),
];

/// The directory that belongs to the attacking user. Each attacking process has a directory below it, with its pid as name.
pub(crate) fn attacker_directory(stage: &Path) -> PathBuf {
    stage.join("attack")
}

fn path_in_own_directory(name: &str) -> PathBuf {
    let folder = attacker_directory(&stage_directory()).join(process::id().to_string());
    fs::create_dir_all(&folder).expect("ours");
    folder.join(name)
}

/// `push %rbp; pop %rbp; ret`
const PUSH_POP_RET: [u8; 3] = [0x55, 0x5d, 0xc3];

/// Files of these names are on a file system that does not answer.
pub(crate) const STALLING_FILE_NAMES: [&str; 2] = ["libcuda.so.1", "ld-linux-x86-64.so.2"];

/// The endpoints of the daemon.
const DAEMON_ENDPOINTS: [&str; 5] = [
    "/metrics",
    "/metrics/quantiles",
    "/api/v1/snapshot",
    "/api/v1/ledger",
    "/healthz",
];

/// Length of a mapping.
const MAPPING_LENGTH: usize = 4096;

/// Maps a file as loaders and libraries are mapped.
fn map_file_as_code(path: &Path) -> *mut std::ffi::c_void {
    let file = File::open(path).expect("it is there");
    let protection = ProtFlags::READ | ProtFlags::EXEC;
    let address = std::ptr::null_mut();
    // SAFETY: a mapping of its own, which nobody executes.
    let mapped = unsafe {
        rustix::mm::mmap(
            address,
            MAPPING_LENGTH,
            protection,
            MapFlags::PRIVATE,
            file,
            0,
        )
    };
    mapped.expect("a file can be mapped")
}

/// Loads and unloads a library. The dynamic loader announces the load, and the daemon looks at this process at once.
fn load_and_unload_library() {
    // SAFETY: loading a library of the C library runs no code of its own.
    drop(unsafe { Library::new("libresolv.so.2") }.expect("part of the C library"));
}

/// Removes a mapping of [`map_file_as_code`].
fn unmap_file(address: *mut std::ffi::c_void) {
    // SAFETY: nothing refers to the mapping.
    unsafe { rustix::mm::munmap(address, MAPPING_LENGTH) }.expect("it is mapped");
}

/// Time for the daemon to look at what was mapped.
fn sleep_until_daemon_has_scanned() {
    thread::sleep(Duration::from_millis(50));
}

/// Maps loaders that show 31 MiB and grow to 40 GiB while they are read.
fn target_grows_loaders(_driver: &Driver, _rounds: u64) {
    end_part_and_wait();
    for number in 0_u64.. {
        let folder = path_in_own_directory(&format!("loaders-{number}"));
        fs::create_dir(&folder).expect("ours");
        let path = folder.join("ld-linux-x86-64.so.2");
        let file = File::create(&path).expect("ours");
        file.set_len(31 << 20).expect("a sparse file");
        let mapped = map_file_as_code(&path);
        load_and_unload_library();
        for _ in 0..20 {
            file.set_len(40 << 30).expect("a sparse file");
            sleep_until_daemon_has_scanned();
            file.set_len(31 << 20).expect("a sparse file");
        }
        unmap_file(mapped);
        fs::remove_dir_all(&folder).expect("ours");
    }
}

/// Maps libraries with many symbols that match a probed function, and with many long names.
fn target_maps_huge_libraries(_driver: &Driver, _rounds: u64) {
    let prefix = "_ZN5torch8autograd6Engine7executeE";
    let matching = (0..100_000).map(|number| global_function(format!("{prefix}{number}"), 3));
    let long = "x".repeat(1000);
    let unique = (0..20_000).map(|number| global_function(format!("{number}{long}"), 3));
    let contents = [
        ElfBuilder::new(&PUSH_POP_RET, matching.collect()).build_file(),
        ElfBuilder::new(&PUSH_POP_RET, unique.collect()).build_file(),
    ];
    end_part_and_wait();
    for number in 0_usize.. {
        let path = path_in_own_directory("libtorch_cpu.so");
        // Another inode each time.
        let _ = fs::remove_file(&path);
        fs::write(&path, &contents[number % contents.len()]).expect("ours");
        let mapped = map_file_as_code(&path);
        load_and_unload_library();
        sleep_until_daemon_has_scanned();
        unmap_file(mapped);
    }
}

/// Maps a library and a loader. Then the file system of both files stops answering.
fn target_maps_dead_files(_driver: &Driver, _rounds: u64) {
    for name in STALLING_FILE_NAMES {
        map_file_as_code(&stage_directory().join("dead").join(name).join(name));
    }
    end_part_and_wait();
    load_and_unload_library();
    loop {
        thread::park();
    }
}

/// Maps this number of copies of a small library.
fn target_maps_copies(_driver: &Driver, copies: u64) {
    map_copies(&["cuInit"], copies);
}

/// Maps this number of copies of a library with every function that is probed in the CUDA driver. Each frequent function
/// has a link of its own.
fn target_maps_full_copies(_driver: &Driver, copies: u64) {
    let symbols = SYMBOLS.iter();
    let symbols = symbols.filter(|symbol| symbol.library == LibraryKind::Cuda);
    let names: Vec<&'static str> = symbols.map(ProbedFunction::name).collect();
    map_copies(&names, copies);
}

fn map_copies(functions: &[&'static str], copies: u64) {
    let mut symbols: Vec<ElfSymbol> = functions
        .iter()
        .map(|name| global_function(*name, 3))
        .collect();
    for (number, symbol) in symbols.iter_mut().enumerate() {
        symbol.address += (number * PUSH_POP_RET.len()) as u64;
    }
    let library = ElfBuilder::new(&PUSH_POP_RET.repeat(symbols.len()), symbols).build_file();
    for copy in 0..copies {
        let path = path_in_own_directory(&format!("libcuda.so.{copy}"));
        fs::write(&path, &library).expect("ours");
    }
    end_part_and_wait();
    for copy in 0..copies {
        map_file_as_code(&path_in_own_directory(&format!("libcuda.so.{copy}")));
    }
    load_and_unload_library();
    loop {
        thread::park();
    }
}

/// Calls `cuInit` all the time, in a private copy and in the library that all users share.
fn target_loops_cu_init(driver: &Driver, _rounds: u64) {
    let copy = path_in_own_directory("libcuda.so.1");
    fs::copy(stage_directory().join("lib/libcuda.so.1"), &copy).expect("ours");
    // SAFETY: loading the software GPU runs no code of its own.
    let private = unsafe { Library::new(&copy) }.expect("a library");
    end_part_and_wait();
    thread::scope(|scope| {
        for library in [driver.cuda(), &private] {
            scope.spawn(move || {
                loop {
                    call!(library, "cuInit", 0);
                }
            });
        }
    });
}

/// Forks short processes that use the GPU, while it holds this number of allocations.
fn target_forks_and_exits(driver: &Driver, allocations: u64) {
    driver.open_first_device();
    for _ in 0..allocations {
        driver.allocate_memory(64);
    }
    end_part_and_wait();
    loop {
        for number in 0..60 {
            // SAFETY: this process has one thread.
            match unsafe { libc::fork() } {
                0 if number % 2 == 0 => {
                    // The software GPU refuses `cuInit` in a forked child, as the real one does. The call is probed.
                    let _ = zernel_testkit::try_call!(driver.cuda(), "cuInit", 0);
                    process::exit(0)
                }
                0 => process::exit(0),
                _ => {}
            }
        }
        while waitpid(None, WaitOptions::empty()).is_ok() {}
    }
}

/// Destroys contexts while it holds this number of allocations.
fn target_destroys_contexts(driver: &Driver, allocations: u64) {
    driver.open_first_device();
    for _ in 0..allocations {
        driver.allocate_memory(64);
    }
    end_part_and_wait();
    loop {
        let mut context = 0_u64;
        call!(
            driver.cuda(),
            "cuCtxCreate_v2",
            out_pointer(&mut context),
            0,
            0
        );
        call!(driver.cuda(), "cuCtxDestroy_v2", context);
    }
}

/// Maps files that are named like libraries and are none.
fn target_maps_refused_files(_driver: &Driver, _rounds: u64) {
    end_part_and_wait();
    for number in 0_u64.. {
        let path = path_in_own_directory(&format!("libcuda.so.refused{number}"));
        fs::write(&path, b"no library").expect("ours");
        let mapped = map_file_as_code(&path);
        load_and_unload_library();
        unmap_file(mapped);
        fs::remove_file(&path).expect("ours");
    }
}

/// Replaces a library by another one as fast as it can, while the last of the deleted ones stay mapped.
fn target_replaces_libraries(_driver: &Driver, mapped_at_once: u64) {
    let library = ElfBuilder::new(&PUSH_POP_RET, vec![global_function("cuInit", 3)]).build_file();
    let (path, new) = (
        path_in_own_directory("libcuda.so.1"),
        path_in_own_directory("new"),
    );
    let mut mapped = VecDeque::new();
    end_part_and_wait();
    loop {
        fs::write(&new, &library).expect("ours");
        fs::rename(&new, &path).expect("ours");
        mapped.push_back(map_file_as_code(&path));
        load_and_unload_library();
        if mapped.len() > mapped_at_once as usize {
            mapped.pop_front().into_iter().for_each(unmap_file);
        }
    }
}

/// Opens 400 connections that send half a request, and 64 WebSockets that read nothing, and opens them again when the
/// daemon ends them.
fn target_holds_connections(_driver: &Driver, _rounds: u64) {
    end_part_and_wait();
    let mut connections: Vec<UnixStream> = Vec::new();
    loop {
        connections.retain(is_connection_open);
        while connections.len() < 464 {
            let request: &[u8] = match connections.len() % 7 {
                0 => {
                    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                      Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
                }
                _ => b"GET /metrics HTTP/1.1\r\nHost: local",
            };
            // The daemon may have stopped.
            let Ok(mut stream) = UnixStream::connect(stage_directory().join("observe.sock")) else {
                return;
            };
            // The daemon may end the connection at once.
            let _ = stream.write_all(request);
            let _ = stream.set_nonblocking(true);
            connections.push(stream);
        }
        sleep_until_daemon_has_scanned();
    }
}

/// Asks for long answers over this number of connections and reads a little of each at a time. Every moment one more client asks, so
/// that the answers are texts of different snapshots.
fn target_reads_slowly(_driver: &Driver, connections: u64) {
    end_part_and_wait();
    let mut readers: Vec<UnixStream> = Vec::new();
    for path in DAEMON_ENDPOINTS.iter().cycle() {
        readers.retain(is_connection_open);
        if readers.len() < connections as usize {
            // The daemon may have stopped.
            let Ok(mut stream) = UnixStream::connect(stage_directory().join("observe.sock")) else {
                return;
            };
            let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
            // The daemon may end the connection at once.
            let _ = stream.write_all(request.as_bytes());
            let _ = stream.set_nonblocking(true);
            readers.push(stream);
        }
        sleep_until_daemon_has_scanned();
    }
}

/// Whether the daemon has not ended a connection.
fn is_connection_open(mut stream: &UnixStream) -> bool {
    match stream.read(&mut [0; 256]) {
        Ok(length) => length > 0,
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
    }
}

/// Starts programs one after the other. Each program loads a copy of a library that no other process has, and calls
/// it.
fn target_executes_programs(_driver: &Driver, _rounds: u64) {
    end_part_and_wait();
    let program = stage_directory().join("program");
    for number in 0_u64.. {
        let folder = path_in_own_directory(&format!("libraries-{number}"));
        fs::create_dir(&folder).expect("ours");
        for name in ["libcuda.so.1", "libnccl.so.2"] {
            fs::copy(stage_directory().join("lib").join(name), folder.join(name)).expect("ours");
        }
        let mut command = Command::new(&program);
        command
            .env(target::ROLE_VARIABLE, "uses_a_library")
            .env(target::LIBRARIES_VARIABLE, &folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        // The program dies with its parent, because it would else look for libraries that the test removes.
        let parent = getpid();
        let die_with_parent = move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            match getppid() == Some(parent) {
                true => Ok(()),
                false => Err(std::io::ErrorKind::NotFound.into()),
            }
        };
        // SAFETY: the child makes two system calls.
        unsafe { command.pre_exec(die_with_parent) };
        let status = command.status().expect("it runs");
        assert!(status.success(), "{status}");
        fs::remove_dir_all(&folder).expect("ours");
    }
}

/// The program of this attack: initializes the library, and exits.
fn target_uses_a_library(driver: &Driver, _rounds: u64) {
    call!(driver.cuda(), "cuInit", 0);
}

/// Asks for every endpoint all the time, over this number of connections. Each request is complete before the answer is read,
/// and a new connection is opened when the daemon ends one.
fn target_floods_requests(_driver: &Driver, connections: u64) {
    end_part_and_wait();
    thread::scope(|scope| {
        for number in 0..connections as usize {
            let path = DAEMON_ENDPOINTS[number % DAEMON_ENDPOINTS.len()];
            scope.spawn(move || {
                let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
                // The daemon may have stopped.
                while let Ok(mut stream) =
                    UnixStream::connect(stage_directory().join("observe.sock"))
                {
                    let mut answer = [0; 64 << 10];
                    while stream.write_all(request.as_bytes()).is_ok()
                        && stream.read(&mut answer).is_ok_and(|length| length > 0)
                    {
                    }
                }
            });
        }
    });
}
