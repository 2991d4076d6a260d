//! Tables of environments and the devices that they select.

use proptest::prelude::*;

use super::*;

/// UUID of the GPU on which the driver was measured.
const MEASURED_GPU_UUID: &str = "GPU-713a8001-4129-af46-2093-26173f053ec1";

fn gpu_facts(index: u32, uuid: &str) -> GpuFacts {
    GpuFacts {
        index,
        uuid: uuid.to_owned(),
        name: "NVIDIA H200".to_owned(),
        minor: Some(index),
        ..GpuFacts::default()
    }
}

/// Four equal GPUs, two of which have UUIDs with a common prefix.
fn four_gpus() -> Vec<GpuFacts> {
    vec![
        gpu_facts(0, "GPU-aaaa0000-0000-0000-0000-000000000000"),
        gpu_facts(1, "GPU-bbbb1111-1111-1111-1111-111111111111"),
        gpu_facts(2, "GPU-cccc2222-2222-2222-2222-222222222222"),
        gpu_facts(3, "GPU-cccc3333-3333-3333-3333-333333333333"),
    ]
}

fn mig_facts(uuid: &str, gpu: u32, compute: u32) -> MigFacts {
    MigFacts {
        uuid: uuid.to_owned(),
        instance: Some(MigInstance { gpu, compute }),
        ..MigFacts::default()
    }
}

/// A GPU without MIG, and one with two MIG devices.
fn gpus_with_mig() -> Vec<GpuFacts> {
    let mut gpus = four_gpus();
    gpus.truncate(2);
    gpus[1].mig_enabled = true;
    gpus[1].mig = vec![
        mig_facts("MIG-d1d1d1d1-0000-5000-8000-000000000000", 1, 0),
        mig_facts("MIG-d2d2d2d2-0000-5000-8000-000000000000", 2, 0),
    ];
    gpus
}

fn visible_indices(visible: &VisibleDevices) -> Vec<u32> {
    visible.devices.iter().map(|device| device.index).collect()
}

/// Device counts of driver 580.159 with one H200, from `cuInit` and `cuDeviceGetCount`, by value of
/// `CUDA_VISIBLE_DEVICES`. `{}` stands for the digits of the UUID.
#[rustfmt::skip] // a table
const DRIVER_RESULTS: &[(&str, usize)] = &[
    ("", 0), (" ", 0), ("0", 1), (" 0", 1), ("0 ", 1), ("\t0", 1), ("\n0", 1), ("+0", 1), ("-0", 1),
    ("00", 1), ("01", 0), ("010", 0), ("0x0", 1), ("0x1", 1), ("0abc", 1), ("a0", 0), ("0 1", 1),
    ("0;1", 1), ("0.5", 1), ("0-1", 1), ("0-", 1), ("--0", 0), ("+ 0", 0),
    ("4294967296", 1), ("4294967297", 0), ("-4294967296", 1), ("18446744073709551616", 0),
    ("0,", 1), (",0", 0), ("0,,0", 1), ("0,0", 0), ("0,00", 0), ("0, 0", 0), ("0,+0", 0), ("0,0abc", 0),
    ("0,1", 1), ("1,0", 0), ("0,5,0", 1), ("0,0,1", 0), ("0,-1", 1), ("-1", 0), ("-1,0", 0), ("-2", 0),
    ("0,foo", 1), ("foo,0", 0), ("NoDevFiles", 0), ("all", 0), ("none", 0), ("void", 0),
    ("GPU-{}", 1), (" GPU-{}", 0), ("GPU-{} ", 1), ("GPU-{},", 1), ("GPU-{}x", 1), ("GPU-{}abc", 1),
    ("GPU-{}/0/0", 1), ("GPU-{}GPU-{}", 1),
    ("GPU-{},GPU-{}", 0), ("GPU-{}, GPU-{}", 1), ("GPU-{},GPU-{}x", 0), ("GPU-{},GPU-ffff,GPU-{}", 1),
    ("GPU-{},MIG-{}", 0), ("0,GPU-{}", 1), ("GPU-{},0", 1), ("GPU-713a,GPU-713a8", 0),
    ("GPU-713a", 1), ("GPU-7", 1), ("GPU-", 0), ("GPU", 0), ("{}", 0), ("gpu-{}", 0),
    ("GPU-713A8001-4129-AF46-2093-26173F053EC1", 1), ("GPU-ffff", 0), ("GPU-ffff,0", 0),
    ("GPU-713x", 0), ("GPU-x713", 0), ("GPU-713-", 1), ("GPU-713a-8001", 1), ("GPU-713a800141", 1),
    ("GPU-713a80014129af46209326173f053ec1", 1), ("GPU-713a8001-4", 1), ("GPU-713a8001-", 1),
    ("GPU-713a8001x", 0), ("GPU-713 ", 0), ("GPU-713 ,foo", 0),
    ("MIG-{}", 1), ("MIG-713a", 1), ("MIG-7", 1), ("MIG-", 0), ("MIG-GPU-{}", 0), ("MIG-GPU-{}/0/0", 0),
];

#[test]
fn device_lists_are_parsed_as_by_the_driver() {
    let one = [gpu_facts(0, MEASURED_GPU_UUID)];
    let digits = &MEASURED_GPU_UUID[4..];
    assert_eq!(VisibleDevices::parse(None, &one).devices.len(), 1);
    for (pattern, count) in DRIVER_RESULTS {
        let value = pattern.replace("{}", digits);
        let visible = VisibleDevices::parse(Some(&value), &one);
        assert_eq!(visible.devices.len(), *count, "{value:?}");
    }
}

proptest! {
    #[test]
    fn no_device_is_listed_twice(list in "(GPU-|MIG-|MIG-GPU-|-|,|/| |\\+|[0-9]|[a-f]|aaaa|\\PC){0,30}") {
        for gpus in [four_gpus(), gpus_with_mig()] {
            let visible = VisibleDevices::parse(Some(&list), &gpus);
            let mut uuids: Vec<_> = visible.devices.iter().map(|device| &device.uuid).collect();
            uuids.sort();
            uuids.dedup();
            prop_assert_eq!(uuids.len(), visible.devices.len());
        }
    }
}

#[test]
fn ordinals_follow_the_order_of_the_list() {
    let cases: [(Option<&str>, &[u32]); 12] = [
        (None, &[0, 1, 2, 3]),
        (Some("2,0"), &[2, 0]),
        (Some("3"), &[3]),
        (Some("1,7,0"), &[1]),
        (Some("1,-1,0"), &[1]),
        (Some("1,2,1"), &[]),
        (Some(""), &[]),
        (Some("GPU-bbbb,GPU-aaaa"), &[1, 0]),
        (Some("GPU-cccc3"), &[3]),
        // A prefix that two GPUs share names none.
        (Some("GPU-cccc"), &[]),
        (Some("GPU-aaaa,GPU-cccc,GPU-bbbb"), &[0]),
        (Some("GPU-aaaa,1"), &[0]),
    ];
    for (value, expected) in cases {
        let visible = VisibleDevices::parse(value, &four_gpus());
        assert_eq!(visible_indices(&visible), expected, "{value:?}");
        assert_eq!(visible.assumptions, [], "{value:?}");
    }
    let visible = VisibleDevices::parse(Some("2,0"), &four_gpus());
    assert_eq!(visible.index_of_ordinal(0), Some(2));
    assert_eq!(visible.index_of_ordinal(2), None);
    assert_eq!(visible.devices[1].uuid, four_gpus()[0].uuid);
}

#[test]
fn indexes_follow_the_pci_bus_not_the_order_of_the_facts() {
    let mut gpus = four_gpus();
    gpus.reverse();
    assert_eq!(
        visible_indices(&VisibleDevices::parse(Some("0,3"), &gpus)),
        [0, 3]
    );
}

#[test]
fn an_unknown_device_order_is_reported_as_an_assumption() {
    let mut gpus = four_gpus();
    gpus[2].name = "NVIDIA L4".to_owned();
    let unknown = [DeviceAssumption::BusOrder];
    let cases: [(Option<&str>, Option<&str>, &[DeviceAssumption]); 6] = [
        (None, None, &unknown),
        (Some("1"), None, &unknown),
        (Some("1"), Some("FASTEST_FIRST"), &unknown),
        (Some("1"), Some("PCI_BUS_ID"), &[]),
        (None, Some("PCI_BUS_ID"), &[]),
        (Some("GPU-bbbb"), None, &[]),
    ];
    for (value, order, expected) in cases {
        let order = DeviceOrder::parse(order);
        let visible = VisibleDevices::parse_ordered(value, order, &gpus);
        assert_eq!(visible.assumptions, expected, "{value:?} {order:?}");
    }
}

#[test]
fn a_process_has_one_mig_device_or_whole_gpus() {
    let first = Some(MigInstance { gpu: 1, compute: 0 });
    let second = Some(MigInstance { gpu: 2, compute: 0 });
    let assumption: &[DeviceAssumption] = &[DeviceAssumption::FirstMigDevice];
    type Case<'a> = (
        Option<&'a str>,
        Option<(u32, Option<MigInstance>)>,
        &'a [DeviceAssumption],
    );
    let cases: [Case<'_>; 8] = [
        (
            Some("MIG-d2d2d2d2-0000-5000-8000-000000000000"),
            Some((1, second)),
            &[],
        ),
        (Some("MIG-d1"), Some((1, first)), &[]),
        (Some("MIG-d2,MIG-d1"), Some((1, second)), &[]),
        (
            Some("MIG-GPU-bbbb1111-1111-1111-1111-111111111111/2/0"),
            Some((1, second)),
            &[],
        ),
        (
            Some("MIG-GPU-bbbb1111-1111-1111-1111-111111111111/7/0"),
            None,
            &[],
        ),
        (Some("MIG-ffff"), None, &[]),
        (None, Some((1, first)), assumption),
        (Some("0"), Some((0, None)), assumption),
    ];
    for (value, expected, assumptions) in cases {
        let visible = VisibleDevices::parse(value, &gpus_with_mig());
        let found: Vec<_> = visible
            .devices
            .iter()
            .map(|device| (device.index, device.instance))
            .collect();
        assert_eq!(found, Vec::from_iter(expected), "{value:?}");
        assert_eq!(visible.assumptions, assumptions, "{value:?}");
    }
}

#[test]
fn mig_devices_without_instance_ids_are_distinguished() {
    let mut gpus = gpus_with_mig();
    gpus[1].mig.iter_mut().for_each(|mig| mig.instance = None);
    let visible = VisibleDevices::parse(Some("MIG-d2,MIG-d1"), &gpus);
    assert_eq!(visible_indices(&visible), [1]);
    assert_eq!(visible.devices[0].uuid, gpus[1].mig[1].uuid);
    assert_eq!(visible.devices[0].instance, None);
}

/// The identity of this process with an empty environment.
fn process_without_environment() -> Identity {
    Identity {
        cuda_visible_devices: None,
        cuda_device_order: None,
        nvidia_visible_devices: None,
        slurm_gpus: None,
        container: None,
        environment_read: true,
        ..crate::identify(std::process::id()).unwrap()
    }
}

fn process_in_container(requested: Option<&str>, cuda: Option<&str>) -> Identity {
    Identity {
        container: Some("c0ffee".to_owned()),
        nvidia_visible_devices: requested.map(str::to_owned),
        cuda_visible_devices: cuda.map(str::to_owned),
        ..process_without_environment()
    }
}

#[test]
fn ordinals_in_a_container_count_its_requested_gpus() {
    let assumption: &[DeviceAssumption] = &[DeviceAssumption::AllGpus];
    type Case<'a> = (
        Option<&'a str>,
        Option<&'a str>,
        &'a [u32],
        &'a [DeviceAssumption],
    );
    let cases: [Case<'_>; 11] = [
        (Some("all"), None, &[0, 1, 2, 3], &[]),
        (Some("2,3"), None, &[2, 3], &[]),
        // The order in the container is that of the bus.
        (Some("3,2"), None, &[2, 3], &[]),
        (Some("2,3"), Some("1"), &[3], &[]),
        (Some("2,3"), Some("2"), &[], &[]),
        (
            Some("GPU-cccc3333-3333-3333-3333-333333333333"),
            Some("0"),
            &[3],
            &[],
        ),
        (Some("2,2"), None, &[2], &[]),
        // The environment does not show the assigned GPUs.
        (Some("void"), Some("1"), &[1], assumption),
        (
            Some("/var/run/nvidia-container-devices"),
            None,
            &[0, 1, 2, 3],
            assumption,
        ),
        (Some("17"), None, &[0, 1, 2, 3], assumption),
        (None, None, &[0, 1, 2, 3], assumption),
    ];
    for (requested, cuda, expected, assumptions) in cases {
        let visible = VisibleDevices::with_device_nodes(
            &process_in_container(requested, cuda),
            &four_gpus(),
            None,
        );
        assert_eq!(
            visible_indices(&visible),
            expected,
            "{requested:?} {cuda:?}"
        );
        assert_eq!(visible.assumptions, assumptions, "{requested:?} {cuda:?}");
    }
}

#[test]
fn a_container_may_request_a_mig_device() {
    for requested in ["MIG-d2d2d2d2-0000-5000-8000-000000000000", "1:1"] {
        let identity = process_in_container(Some(requested), None);
        let visible = VisibleDevices::with_device_nodes(&identity, &gpus_with_mig(), None);
        let second = Some(MigInstance { gpu: 2, compute: 0 });
        assert_eq!(visible.devices.len(), 1, "{requested}");
        assert_eq!(visible.devices[0].instance, second, "{requested}");
    }
}

#[test]
fn device_nodes_override_the_requested_gpus() {
    type Case<'a> = (Option<&'a str>, Option<&'a str>, &'a [u32], &'a [u32]);
    let cases: [Case<'_>; 4] = [
        (Some("all"), Some("1"), &[1, 3], &[3]),
        (Some("void"), None, &[2], &[2]),
        // A privileged container sees all GPUs.
        (Some("2"), Some("0"), &[0, 1, 2, 3], &[0]),
        (None, None, &[3, 0], &[0, 3]),
    ];
    for (requested, cuda, minors, expected) in cases {
        let identity = process_in_container(requested, cuda);
        let visible = VisibleDevices::with_device_nodes(&identity, &four_gpus(), Some(minors));
        assert_eq!(
            visible_indices(&visible),
            expected,
            "{requested:?} {minors:?}"
        );
        assert_eq!(visible.assumptions, [], "{requested:?} {minors:?}");
    }
}

#[test]
fn device_nodes_are_matched_by_minor_number() {
    let mut gpus = four_gpus();
    gpus[0].minor = Some(1);
    gpus[1].minor = Some(0);
    let visible =
        VisibleDevices::with_device_nodes(&process_in_container(None, None), &gpus, Some(&[0]));
    assert_eq!(visible_indices(&visible), [1]);
}

#[test]
fn nvidia_visible_devices_is_ignored_outside_containers() {
    let identity = Identity {
        nvidia_visible_devices: Some("2".to_owned()),
        ..process_without_environment()
    };
    let visible = VisibleDevices::with_device_nodes(&identity, &four_gpus(), None);
    assert_eq!(visible_indices(&visible), [0, 1, 2, 3]);
}

#[test]
fn ordinals_under_slurm_count_the_gpus_of_the_job() {
    let assumption: &[DeviceAssumption] = &[DeviceAssumption::SlurmHidesGpus];
    type Case<'a> = (&'a str, Option<&'a str>, &'a [u32], &'a [DeviceAssumption]);
    let cases: [Case<'_>; 9] = [
        ("2,3", Some("0,1"), &[2, 3], assumption),
        // One GPU per rank, selected by Slurm or by the job.
        ("2,3", Some("3"), &[3], &[]),
        ("2,3", Some("2"), &[2], &[]),
        ("2,3", Some("1"), &[3], assumption),
        ("2,3", Some("2,3"), &[2, 3], &[]),
        ("0,1", Some("0,1"), &[0, 1], &[]),
        ("2,3", Some("GPU-cccc3"), &[3], &[]),
        ("2,3", None, &[0, 1, 2, 3], &[]),
        ("gpu:two", Some("0"), &[0], &[]),
    ];
    for (given, cuda, expected, assumptions) in cases {
        let identity = Identity {
            slurm_gpus: Some(given.to_owned()),
            cuda_visible_devices: cuda.map(str::to_owned),
            ..process_without_environment()
        };
        let visible = VisibleDevices::with_device_nodes(&identity, &four_gpus(), None);
        assert_eq!(visible_indices(&visible), expected, "{given} {cuda:?}");
        assert_eq!(visible.assumptions, assumptions, "{given} {cuda:?}");
    }
}

#[test]
fn an_unreadable_environment_is_reported_as_an_assumption() {
    let identity = Identity {
        environment_read: false,
        ..process_without_environment()
    };
    let visible = VisibleDevices::with_device_nodes(&identity, &four_gpus(), None);
    assert_eq!(visible.assumptions, [DeviceAssumption::EmptyEnvironment]);
}

#[test]
fn without_gpus_no_device_is_visible() {
    for value in [None, Some("0"), Some("GPU-aaaa"), Some("MIG-aaaa")] {
        assert_eq!(VisibleDevices::parse(value, &[]), VisibleDevices::default());
    }
    assert_eq!(
        ordinal_to_index(&process_without_environment(), 0, &[]),
        None
    );
}
