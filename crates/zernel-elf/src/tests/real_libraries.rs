//! Real libraries: the machine's C library and those of the software GPU.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use object::{Object, ObjectSymbol, SymbolKind};
use procfs::process::{MMPermissions, MMapPath, Process};
use rustix::fs::Mode;
use zernel_softgpu::install::Prologue;

use super::{cuda_path, install_softgpu};
use crate::*;

/// Returns the path of this process's C library, and its entry in `map_files`.
fn own_libc() -> (PathBuf, PathBuf) {
    let maps = Process::myself().unwrap().maps().unwrap();
    maps.iter()
        .find_map(|map| match &map.pathname {
            MMapPath::Path(path)
                if map.perms.contains(MMPermissions::EXECUTE)
                    && path.file_name().is_some_and(|name| name == "libc.so.6") =>
            {
                let (start, end) = map.address;
                let mapped = format!("/proc/self/map_files/{start:x}-{end:x}");
                Some((path.clone(), PathBuf::from(mapped)))
            }
            _ => None,
        })
        .unwrap()
}

#[cfg(target_arch = "x86_64")]
#[test]
fn each_prologue_is_probed_at_its_cheapest_instruction() {
    for (prologue, bytes_after_entry, trap) in [
        (Prologue::Push, 0, TrapCost::Emulated),
        (Prologue::Endbr64, 4, TrapCost::Emulated),
        (Prologue::Mov, 3, TrapCost::Emulated),
        (Prologue::Sub, 0, TrapCost::SingleStepped),
    ] {
        let directory = install_softgpu(prologue);
        let content = fs::read(cuda_path(&directory)).unwrap();
        let library = Library::open(&cuda_path(&directory)).unwrap();
        let file = object::File::parse(&*content).unwrap();
        let exports = file
            .dynamic_symbols()
            .filter(|it| it.is_definition() && it.kind() == SymbolKind::Text);
        let names: Vec<&str> = exports.map(|it| it.name().unwrap()).collect();
        assert!(names.contains(&"cuLaunchKernel") && names.len() > 50);
        for (name, site) in names.iter().zip(library.find_exact_sites(&names)) {
            let site = site.unwrap();
            assert_eq!(
                site.bytes_after_entry, bytes_after_entry,
                "{prologue:?} {name}"
            );
            assert_eq!(site.trap, trap, "{prologue:?} {name}");
            let entry = site.file_offset as usize - usize::from(bytes_after_entry);
            assert!(content[entry..].starts_with(prologue.machine_code()));
        }
    }
}

#[test]
fn libc_sites_match_the_addresses_of_the_loader() {
    let (path, _) = own_libc();
    let library = Library::open(&path).unwrap();
    let addresses = [
        ("malloc", libc::malloc as *const () as u64),
        ("getpid", libc::getpid as *const () as u64),
        ("pthread_create", libc::pthread_create as *const () as u64),
        // The C library has two versions of this symbol; programs link to the default one.
        (
            "pthread_cond_wait",
            libc::pthread_cond_wait as *const () as u64,
        ),
    ];
    let maps = Process::myself().unwrap().maps().unwrap();
    for (name, address) in addresses {
        let site = library.find_site(name).unwrap();
        let map = maps
            .iter()
            .find(|map| (map.address.0..map.address.1).contains(&address))
            .unwrap();
        let entry = address - map.address.0 + map.offset;
        assert_eq!(
            site.file_offset - u64::from(site.bytes_after_entry),
            entry,
            "{name}"
        );
        if site.bytes_after_entry > 0 {
            let byte = library.read(site.file_offset, 1).unwrap()[0];
            assert!(matches!(byte, 0x41 | 0x50..=0x57 | 0x70..=0x7f | 0x0f | 0x90 | 0xe9 | 0xeb));
        }
    }
}

#[test]
fn a_mapped_file_opens_through_map_files() {
    let (path, mapping) = own_libc();
    // `map_files` needs a privilege that tests may lack.
    match Library::open(&mapping) {
        Ok(library) => assert_eq!(
            library.find_site("malloc").unwrap(),
            Library::open(&path).unwrap().find_site("malloc").unwrap()
        ),
        Err(error) => assert!(error.to_string().contains("permitted"), "{error}"),
    }
}

#[test]
fn symbols_without_a_probe_site_have_a_reason() {
    let (path, _) = own_libc();
    let library = Library::open(&path).unwrap();
    let names = ["no_such_function", "environ", "memcpy", "", "malloc"];
    let sites = library.find_exact_sites(&names);
    assert!(matches!(sites[0], Err(SiteError::NotExported { .. })));
    assert!(matches!(sites[1], Err(SiteError::NotAFunction { .. })));
    if cfg!(all(target_arch = "x86_64", target_env = "gnu")) {
        assert!(matches!(sites[2], Err(SiteError::IndirectFunction { .. })));
    }
    assert!(matches!(sites[3], Err(SiteError::NotExported { .. })));
    assert!(sites[4].is_ok());
}

#[test]
fn imported_functions_are_not_found() {
    let directory = install_softgpu(Prologue::Push);
    let library = Library::open(&cuda_path(&directory)).unwrap();
    assert!(matches!(
        library.find_site("malloc"),
        Err(SiteError::NotExported { .. })
    ));
}

#[test]
fn functions_linked_into_a_program_are_found() {
    #[unsafe(no_mangle)]
    extern "C" fn zernel_library_test_function() -> u64 {
        std::hint::black_box(7)
    }
    assert_eq!(zernel_library_test_function(), 7);
    let library = Library::open(Path::new("/proc/self/exe")).unwrap();
    library.find_site("zernel_library_test_function").unwrap();
}

#[test]
fn files_that_are_not_regular_are_refused_without_blocking() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
    let looped = directory.path().join("loop");
    symlink(&looped, &looped).unwrap();
    let socket = directory.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    for path in [&pipe, &socket, directory.path(), Path::new("/dev/null")] {
        assert!(matches!(
            Library::open(path),
            Err(LibraryError::NotAFile { .. })
        ));
    }
    for path in [&looped, &directory.path().join("missing")] {
        assert!(matches!(
            Library::open(path),
            Err(LibraryError::Unreadable { .. })
        ));
    }
}

#[test]
fn an_identity_survives_a_rename_but_not_a_change() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name| directory.path().join(name);
    let open = |name| File::options().write(true).open(path(name)).unwrap();
    let identity = |file: &File| FileIdentity::read(file).unwrap();
    fs::write(path("old"), "content").unwrap();
    let original = identity(&open("old"));
    fs::rename(path("old"), path("new")).unwrap();
    assert_eq!(identity(&open("new")), original);

    let modified = open("new").metadata().unwrap().modified().unwrap();
    fs::copy(path("new"), path("copy")).unwrap();
    open("copy").set_modified(modified).unwrap();
    assert_ne!(identity(&open("copy")), original, "replaced");

    let changed = open("new");
    changed.set_len(3).unwrap();
    changed.set_modified(modified).unwrap();
    assert_ne!(identity(&changed), original, "shortened");
    changed.set_len(7).unwrap();
    changed.set_modified(modified).unwrap();
    assert_eq!(identity(&changed), original);
    changed
        .set_modified(modified + Duration::from_secs(1))
        .unwrap();
    assert_ne!(identity(&changed), original, "written to");
}

#[test]
fn a_change_after_opening_is_an_error() {
    let directory = install_softgpu(Prologue::Push);
    let path = cuda_path(&directory);
    let library = Library::open(&path).unwrap();
    let before = library.find_site("cuInit").unwrap();

    fs::rename(&path, directory.path().join("aside")).unwrap();
    fs::write(&path, "another file").unwrap();
    assert_eq!(library.find_site("cuInit").unwrap(), before, "replaced");

    let file = OpenOptions::new()
        .write(true)
        .open(directory.path().join("aside"))
        .unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(1))
        .unwrap();
    let changed = library.find_functions(&[FunctionName::Exact("cuInit")]);
    assert!(matches!(changed, Err(LibraryError::Changed { .. })));
    file.set_len(100).unwrap();
    let changed = library.find_functions(&[FunctionName::Exact("cuInit")]);
    assert!(matches!(changed, Err(LibraryError::Changed { .. })));
}
