//! More library files than may be probed at once.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use zernel_ebpf::metrics::{self, TextFormat};
use zernel_ebpf::observer::Observer;
use zernel_model::snapshot::Scope;
use zernel_softgpu::install::Prologue;
use zernel_testkit::elf_builder::{ElfBuilder, global_function};
use zernel_testkit::eventually;
use zernel_testkit::target::{Driver, Stage, Target, TargetRole, stage_directory};

use crate::files::map_code;
use crate::harness::{assert_exact, functions_in_ledger, observe_stage};

pub(crate) const MANY_FILES_ROLES: &[(&str, TargetRole)] = &[("maps_copies", target_maps_copies)];

/// More files than one user may have probed.
const LIBRARY_COPIES: u64 = 450;
const NOBODY_UID: u32 = 65534;

/// Maps this number of copies of a library.
fn target_maps_copies(_driver: &Driver, rounds: u64) {
    let user = rustix::process::getuid().as_raw();
    for copy in 0..rounds {
        map_code(&stage_directory().join(format!("copies/libcuda.so.{user}.{copy}")));
    }
}

/// Number of attached files of a user.
fn attached_file_count(observer: &Observer, user: u32) -> usize {
    let ledger = observer.snapshot().ledger_json(Scope::All);
    let files = ledger["files"].as_array().expect("a list").iter();
    let of_user = format!("libcuda.so.{user}.");
    files
        .filter(|file| {
            file["path"]
                .as_str()
                .is_some_and(|path| path.contains(&of_user))
        })
        .count()
}

/// Writes small libraries for a user.
fn write_copies(stage: &Stage, user: u32, copies: u64) {
    let folder = stage.path().join("copies");
    fs::create_dir_all(&folder).expect("ours");
    let library =
        ElfBuilder::new(&[0x55, 0x5d, 0xc3], vec![global_function("cuInit", 3)]).build_file();
    for copy in 0..copies {
        let name = format!("libcuda.so.{user}.{copy}");
        fs::write(folder.join(name), &library).expect("there is room");
    }
}

/// A user with too many libraries gets a share of the probes. Libraries of other users get their probes, and their
/// processes are counted exactly.
pub(crate) fn one_tenant_has_a_share_of_the_probed_files() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    fs::set_permissions(stage.path(), fs::Permissions::from_mode(0o755)).expect("ours");
    write_copies(&stage, NOBODY_UID, LIBRARY_COPIES);
    write_copies(&stage, 0, 3);
    let mut observer = observe_stage(&stage);
    let mut command = stage.target_command("maps_copies", LIBRARY_COPIES);
    let mut greedy = Target::start(command.uid(NOBODY_UID));
    greedy.run_part();
    observer.scan().expect("processes can be scanned");
    eventually("its share is attached to", || {
        observer.discover().expect("processes can be discovered");
        attached_file_count(&observer, NOBODY_UID) >= 200
    });
    let share = attached_file_count(&observer, NOBODY_UID);
    assert!(share < LIBRARY_COPIES as usize, "{share}");
    let refused = observer.snapshot().ledger_json(Scope::All)["refused"].to_string();
    assert!(refused.contains("more library files than"), "{refused}");
    let text = metrics::metrics_text(&observer.snapshot(), Scope::All, TextFormat::Prometheus);
    let series = "zernel_observe_refused_files_total{cause=\"too many files\"} ";
    assert!(text.contains(series), "{series}");
    let problems = observer.problems();
    assert!(
        problems
            .iter()
            .any(|it| it.contains("library files were refused")),
        "{problems:?}"
    );

    let mut modest = stage.start_target("maps_copies", 3);
    modest.run_part();
    eventually("three files of another user are attached to", || {
        observer.scan().expect("processes can be scanned");
        attached_file_count(&observer, 0) >= 3
    });
    assert_eq!(attached_file_count(&observer, 0), 3);
    let first = stage.path().join("copies/libcuda.so.0.0");
    let functions = functions_in_ledger(&observer, first.to_str().expect("text"));
    assert!(functions.contains_key("cuInit"), "{functions:?}");
    let mut targets = [stage.start_target("everything", 10)];
    targets[0].run_part();
    assert_exact(&mut observer, &stage, &targets);
}
