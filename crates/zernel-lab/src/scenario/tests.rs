use std::process::Command;

use super::*;

const SMALL_SCENARIO: &str = "about = 'a test'\n[[group]]\nname = 'a'\n";

fn scenario_error(text: &str) -> String {
    Scenario::parse(text, "some.toml").unwrap_err().to_string()
}

#[test]
fn scenario_is_named_after_its_file() {
    let text = format!(
        "{SMALL_SCENARIO}[[cgroup]]\nname = 'c'\ngroups = ['a']\nweight = 200\n[[step]]\nat_ms = 5\naction = {{ freeze = 'c' }}"
    );
    let scenario = Scenario::parse(&text, "scenarios/some.toml").unwrap();
    assert_eq!(scenario.name, "some");
    assert_eq!(scenario.cgroup_of_group("a").unwrap().weight, Some(200));
    assert_eq!(
        scenario.steps[0].action,
        ScenarioAction::Freeze("c".to_owned())
    );
    assert!(!scenario.needs_software_gpu());
}

#[test]
fn scenario_errors_name_the_key() {
    for (text, expected) in [
        ("[[group]]\nname = 'a'".to_owned(), "key `about` is missing"),
        (
            format!("colour = 1\n{SMALL_SCENARIO}"),
            "unknown field `colour`",
        ),
        (
            format!("{SMALL_SCENARIO}colour = 1"),
            "unknown field `colour`",
        ),
        (
            format!("{SMALL_SCENARIO}[[group]]\nname = 'a'"),
            "two groups have this name",
        ),
        (
            format!("topology = '4x'\n{SMALL_SCENARIO}"),
            "key `topology`",
        ),
        (
            format!("training = ['b']\n{SMALL_SCENARIO}"),
            "there is no group `b`; there are [a]",
        ),
        (
            format!("{SMALL_SCENARIO}[[cgroup]]\nname = 'x/y'"),
            "there is no cgroup `x` before it",
        ),
        (
            format!("{SMALL_SCENARIO}[[cgroup]]\nname = 'x'\nweight = 0"),
            "cgroup `x`, key `weight`",
        ),
        (
            format!(
                "{SMALL_SCENARIO}[[cgroup]]\nname = 'x'\ngroups = ['a']\n[[cgroup]]\nname = 'x/y'"
            ),
            "holds processes or children",
        ),
        (
            format!("{SMALL_SCENARIO}[[step]]\nat_ms = 9000\naction = {{ add = 'a' }}"),
            "comes after the end at 2000 ms",
        ),
        (
            format!("{SMALL_SCENARIO}[[step]]\nat_ms = 9\naction = {{ freeze = 'a' }}"),
            "there is no cgroup `a`",
        ),
        (
            format!("{SMALL_SCENARIO}[[step]]\nat_ms = 9\naction = {{ offline = 0 }}"),
            "CPU 0 cannot be switched",
        ),
        (
            format!(
                "{SMALL_SCENARIO}[[assert]]\nlatency = {{ group = 'b', quantile = 0.5, at_most_us = 1 }}"
            ),
            "there is no group `b`",
        ),
        (
            format!(
                "{SMALL_SCENARIO}work.inference = {{ gpu = {{ driver = '/lib/libcuda.so.1' }} }}"
            ),
            "the driver in the virtual machine is `/softgpu/libcuda.so.1`",
        ),
        (
            format!("{SMALL_SCENARIO}nice = 40"),
            "group `a`, field `nice`",
        ),
    ] {
        let error = scenario_error(&text);
        assert!(error.starts_with("some.toml: "), "{error}");
        assert!(error.contains(expected), "{text}\n{error}");
    }
}

#[test]
fn missing_scenario_file_is_named() {
    let error = Scenario::load(Path::new("/no/such.toml"))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("/no/such.toml: cannot read it"),
        "{error}"
    );
}

#[test]
fn every_shipped_scenario_loads() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    let mut files = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            Scenario::load(&path).unwrap();
            files += 1;
        }
    }
    assert!(files >= 20, "{files} scenarios");
}

/// Figures of different days can be compared only if the scenarios are the same.
#[test]
fn shipped_scenarios_match_frozen_checksums() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    let frozen = fs::read_to_string(folder.join("frozen.sha256")).unwrap();
    let listed: BTreeSet<&str> = frozen
        .lines()
        .filter_map(|line| line.split_once("  "))
        .map(|(_, file)| file)
        .collect();
    let present: BTreeSet<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".toml"))
        .collect();
    assert!(
        listed
            .iter()
            .copied()
            .eq(present.iter().map(String::as_str)),
        "scenarios/frozen.sha256 lists {listed:?}, there are {present:?}"
    );
    let checksum_run = Command::new("sha256sum")
        .args(["--check", "--strict", "--quiet", "frozen.sha256"])
        .current_dir(&folder)
        .output()
        .unwrap();
    assert!(
        checksum_run.status.success(),
        "a frozen scenario changed, and with it every figure that was measured with it:\n{}\
         if that is wanted, run `sha256sum *.toml >frozen.sha256` in scenarios/ and measure anew",
        String::from_utf8_lossy(&checksum_run.stdout)
    );
}
