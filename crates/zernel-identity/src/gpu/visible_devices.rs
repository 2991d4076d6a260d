//! The CUDA devices of a process: from its environment, the CUDA driver's rules and its container.
//!
//! The rules for `CUDA_VISIBLE_DEVICES` were measured with driver 580 on a machine with one GPU:
//! - The first entry decides whether the list contains ordinals or UUIDs.
//! - The list ends at the first entry that names no device. A list that names a device twice is
//!   empty.
//! - Ordinals are parsed as by C's `strtol`; trailing text is ignored.
//! - A prefix of a UUID is enough.
//!
//! Two rules are from NVIDIA's documentation: a prefix that several devices share names none, and a
//! process has at most one MIG device.

use serde::Serialize;

use super::{GpuFacts, MigFacts, MigInstance, device_nodes};
use crate::Identity;

/// Number of hex digits in a UUID.
const UUID_DIGITS: usize = 32;

/// A CUDA device that a process can use.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct CudaDevice {
    /// NVML index of the GPU.
    pub index: u32,
    /// UUID of the GPU or of the MIG device.
    pub uuid: String,
    /// Instance ids of a MIG device, if NVML reports them; `None` for a whole GPU.
    pub instance: Option<MigInstance>,
}

impl CudaDevice {
    /// Whether the device is a MIG device.
    #[must_use]
    pub fn is_mig_device(&self) -> bool {
        self.uuid.starts_with("MIG-")
    }
}

/// Order in which the driver numbers devices: `CUDA_DEVICE_ORDER`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceOrder {
    /// Fastest first, by a measure of the driver; the default. Equal GPUs are in bus order.
    #[default]
    FastestFirst,
    /// Order on the PCI bus, as in NVML.
    PciBusId,
}

impl DeviceOrder {
    /// Parses the value of the variable.
    #[must_use]
    pub fn parse(value: Option<&str>) -> Self {
        match value {
            Some("PCI_BUS_ID") => Self::PciBusId,
            _ => Self::FastestFirst,
        }
    }
}

/// An assumption of the mapping that may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceAssumption {
    /// The GPU models differ, and the mapping assumes that the driver numbers them in bus order.
    BusOrder,
    /// A GPU in MIG mode is named as a whole, and the mapping assumes its first MIG device.
    FirstMigDevice,
    /// The assigned GPUs of the container are unknown, and the mapping assumes all GPUs.
    AllGpus,
    /// The mapping assumes that Slurm hides GPUs outside of the job.
    SlurmHidesGpus,
    /// The environment is unreadable, and the mapping assumes that no variable restricts the devices.
    EmptyEnvironment,
}

/// The CUDA devices of a process, ordered by CUDA ordinal.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct VisibleDevices {
    /// Devices by CUDA ordinal.
    pub devices: Vec<CudaDevice>,
    /// Assumptions of the mapping.
    pub assumptions: Vec<DeviceAssumption>,
}

impl VisibleDevices {
    /// Returns the devices that this value of `CUDA_VISIBLE_DEVICES` selects, in the default order.
    #[must_use]
    pub fn parse(value: Option<&str>, gpus: &[GpuFacts]) -> Self {
        Self::parse_ordered(value, DeviceOrder::default(), gpus)
    }

    /// Returns the devices that this value of `CUDA_VISIBLE_DEVICES` selects.
    #[must_use]
    pub fn parse_ordered(value: Option<&str>, order: DeviceOrder, gpus: &[GpuFacts]) -> Self {
        let mut gpus: Vec<_> = gpus.iter().collect();
        gpus.sort_by_key(|gpu| gpu.index);
        let by_uuid = value.is_some_and(is_uuid_list);
        let devices = match value {
            None => gpus
                .iter()
                .map(|gpu| whole_or_first_mig_device(gpu))
                .collect(),
            Some(list) if by_uuid => select_devices(list, |entry| find_by_uuid(entry, &gpus)),
            Some(list) => select_devices(list, |entry| find_by_ordinal(entry, &gpus)),
        };
        let mut visible = Self {
            devices: one_mig_device_or_whole_gpus(devices),
            assumptions: Vec::new(),
        };
        let same_model = gpus.windows(2).all(|pair| pair[0].name == pair[1].name);
        visible.add_assumption_if(
            DeviceAssumption::BusOrder,
            !by_uuid && order == DeviceOrder::FastestFirst && !same_model,
        );
        let names_mig_devices = value.is_some_and(|list| list.starts_with("MIG-"));
        visible.add_assumption_if(
            DeviceAssumption::FirstMigDevice,
            !names_mig_devices && gpus.iter().any(|gpu| gpu.mig_enabled),
        );
        visible
    }

    /// Returns the devices of a process: its container or Slurm restricts the GPUs, then its
    /// environment selects among them.
    #[must_use]
    pub fn for_process(identity: &Identity, gpus: &[GpuFacts]) -> Self {
        Self::with_device_nodes(
            identity,
            gpus,
            device_nodes::visible_minors(identity).as_deref(),
        )
    }

    /// As [`for_process`](Self::for_process), with the minor numbers of the visible device nodes.
    fn with_device_nodes(identity: &Identity, gpus: &[GpuFacts], minors: Option<&[u32]>) -> Self {
        let list = identity.cuda_visible_devices.as_deref();
        let (reachable, assumption) = reachable_gpus(identity, gpus, minors);
        let (reachable, slurm) = restrict_to_slurm_gpus(identity, reachable);
        let order = DeviceOrder::parse(identity.cuda_device_order.as_deref());
        let mut visible = Self::parse_ordered(list, order, &reachable);
        visible.assumptions.extend(assumption);
        visible.assumptions.extend(slurm);
        visible.add_assumption_if(
            DeviceAssumption::EmptyEnvironment,
            !identity.environment_read,
        );
        visible
    }

    /// Returns the NVML index of the GPU behind CUDA device `ordinal`.
    #[must_use]
    pub fn index_of_ordinal(&self, ordinal: u32) -> Option<u32> {
        let device = self.devices.get(usize::try_from(ordinal).ok()?)?;
        Some(device.index)
    }

    fn add_assumption_if(&mut self, assumption: DeviceAssumption, is_made: bool) {
        if is_made {
            self.assumptions.push(assumption);
        }
    }
}

/// Returns the NVML index of a process's CUDA device `ordinal`. [`VisibleDevices::for_process`]
/// also returns the assumptions.
#[must_use]
pub fn ordinal_to_index(identity: &Identity, ordinal: u32, gpus: &[GpuFacts]) -> Option<u32> {
    VisibleDevices::for_process(identity, gpus).index_of_ordinal(ordinal)
}

/// Returns the GPUs with a device node, or if the nodes are unknown, the GPUs that the container
/// requested.
fn reachable_gpus(
    identity: &Identity,
    gpus: &[GpuFacts],
    minors: Option<&[u32]>,
) -> (Vec<GpuFacts>, Option<DeviceAssumption>) {
    if let Some(minors) = minors {
        let has_node = |gpu: &&GpuFacts| gpu.minor.is_none_or(|minor| minors.contains(&minor));
        return (gpus.iter().filter(has_node).cloned().collect(), None);
    }
    if identity.container.is_none() {
        return (gpus.to_vec(), None);
    }
    match requested_gpus(identity.nvidia_visible_devices.as_deref(), gpus) {
        Some(requested) => (requested, None),
        None => (gpus.to_vec(), Some(DeviceAssumption::AllGpus)),
    }
}

/// Returns the GPUs that `NVIDIA_VISIBLE_DEVICES` requests from the container runtime: `all`, or
/// indexes and UUIDs. `void`, `none` and paths mean that devices are assigned in another way or not
/// at all.
fn requested_gpus(value: Option<&str>, gpus: &[GpuFacts]) -> Option<Vec<GpuFacts>> {
    let value = value?.trim();
    if value == "all" {
        return Some(gpus.to_vec());
    }
    let mut requested: Vec<GpuFacts> = Vec::new();
    for entry in value.split(',') {
        let (gpu, mig) = requested_device(entry.trim(), gpus)?;
        if requested.iter().all(|known| known.index != gpu.index) {
            requested.push(GpuFacts {
                mig: Vec::new(),
                ..gpu.clone()
            });
        }
        let known = requested
            .iter_mut()
            .find(|known| known.index == gpu.index)?;
        match mig {
            Some(mig) => known.mig.push(mig.clone()),
            None => known.mig.clone_from(&gpu.mig),
        }
    }
    Some(requested)
}

/// Finds the device of an entry: `1`, `GPU-…`, `MIG-…`, or `1:0` for the first MIG device of GPU 1.
fn requested_device<'a>(
    entry: &str,
    gpus: &'a [GpuFacts],
) -> Option<(&'a GpuFacts, Option<&'a MigFacts>)> {
    if let Some((gpu, mig)) = entry.split_once(':') {
        let (gpu, _) = requested_device(gpu, gpus)?;
        return Some((gpu, Some(gpu.mig.get(mig.parse::<usize>().ok()?)?)));
    }
    if let Ok(index) = entry.parse::<u32>() {
        return Some((gpus.iter().find(|gpu| gpu.index == index)?, None));
    }
    gpus.iter().find_map(|gpu| {
        if gpu.uuid == entry {
            return Some((gpu, None));
        }
        let mig = gpu.mig.iter().find(|mig| mig.uuid == entry)?;
        Some((gpu, Some(mig)))
    })
}

/// Restricts the GPUs to those of the Slurm job if `CUDA_VISIBLE_DEVICES` numbers the GPUs of the job from 0.
///
/// Slurm sets the variable to the machine's GPU numbers. If Slurm also hides the other GPUs, it numbers the job's
/// GPUs from 0. So numbers that differ from the assigned ones are positions within the job's GPUs, unless a number is
/// too large for that. If one is too large, a rank uses only some of the assigned GPUs.
fn restrict_to_slurm_gpus(
    identity: &Identity,
    gpus: Vec<GpuFacts>,
) -> (Vec<GpuFacts>, Option<DeviceAssumption>) {
    let list = identity.cuda_visible_devices.as_deref();
    let Some(slurm_gpus) = identity.slurm_gpus.as_deref().filter(|_| list.is_some()) else {
        return (gpus, None);
    };
    let numbers: Option<Vec<u32>> = slurm_gpus
        .split(',')
        .map(|number| number.trim().parse().ok())
        .collect();
    match numbers {
        Some(numbers)
            if list != Some(slurm_gpus)
                && list.is_some_and(|list| {
                    !is_uuid_list(list) && are_all_below(list, numbers.len())
                }) =>
        {
            let is_given = |gpu: &GpuFacts| numbers.contains(&gpu.minor.unwrap_or(gpu.index));
            let left = gpus.into_iter().filter(is_given).collect();
            (left, Some(DeviceAssumption::SlurmHidesGpus))
        }
        _ => (gpus, None),
    }
}

/// Whether every index is below `count`.
fn are_all_below(list: &str, count: usize) -> bool {
    let mut numbers = list.split(',').filter_map(leading_number);
    numbers.all(|number| usize::try_from(number).is_ok_and(|number| number < count))
}

/// Returns the devices of a list up to the first invalid entry; none if a device occurs twice.
fn select_devices(list: &str, find: impl Fn(&str) -> Option<CudaDevice>) -> Vec<CudaDevice> {
    let mut devices = Vec::new();
    for device in list.split(',').map_while(find) {
        if devices.contains(&device) {
            return Vec::new();
        }
        devices.push(device);
    }
    devices
}

fn find_by_ordinal(entry: &str, gpus: &[&GpuFacts]) -> Option<CudaDevice> {
    let ordinal = usize::try_from(leading_number(entry)?).ok()?;
    gpus.get(ordinal).map(|gpu| whole_or_first_mig_device(gpu))
}

/// Parses a number as `strtol` does and truncates it to 32 bits as the driver does. `None` without
/// digits.
fn leading_number(entry: &str) -> Option<i32> {
    let text = entry.trim_start_matches([' ', '\t', '\n', '\x0b', '\x0c', '\r']);
    let (is_negative, unsigned) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = unsigned.find(|letter: char| !letter.is_ascii_digit());
    let digits = &unsigned[..end.unwrap_or(unsigned.len())];
    if digits.is_empty() {
        return None;
    }
    let number: i64 = digits.parse().unwrap_or(i64::MAX);
    Some(if is_negative { -number } else { number } as i32)
}

fn is_uuid_list(list: &str) -> bool {
    list.starts_with("GPU-") || list.starts_with("MIG-")
}

/// Finds the only device whose UUID starts with the digits of `entry`. The prefix is ignored,
/// because the driver also finds GPUs under `MIG-`.
fn find_by_uuid(entry: &str, gpus: &[&GpuFacts]) -> Option<CudaDevice> {
    if let Some(path) = entry.strip_prefix("MIG-GPU-") {
        return find_by_mig_path(path, gpus);
    }
    let wanted = uuid_digits(entry)?;
    let has = |uuid: &str| uuid_digits(uuid).is_some_and(|digits| digits.starts_with(&wanted));
    let mut found = gpus.iter().flat_map(|gpu| {
        let whole = has(&gpu.uuid).then(|| whole_or_first_mig_device(gpu));
        let migs = gpu.mig.iter().filter(|mig| has(&mig.uuid));
        whole
            .into_iter()
            .chain(migs.map(|mig| mig_device(gpu, mig)))
    });
    let only = found.next()?;
    found.next().is_none().then_some(only)
}

/// Finds a MIG device by `<GPU UUID>/<GPU instance>/<compute instance>`, the naming of drivers
/// before 470.
fn find_by_mig_path(path: &str, gpus: &[&GpuFacts]) -> Option<CudaDevice> {
    let mut fields = path.split('/');
    let uuid = fields.next()?;
    let mut number = || fields.next()?.parse().ok();
    let instance = MigInstance {
        gpu: number()?,
        compute: number()?,
    };
    let has_uuid = |gpu: &&&GpuFacts| gpu.uuid.strip_prefix("GPU-") == Some(uuid);
    let gpu = gpus.iter().find(has_uuid)?;
    let has_instance = |mig: &&MigFacts| mig.instance == Some(instance);
    gpu.mig
        .iter()
        .find(has_instance)
        .map(|mig| mig_device(gpu, mig))
}

/// Returns the digits after the prefix, in lower case and without hyphens. Text after a complete
/// UUID is ignored.
fn uuid_digits(entry: &str) -> Option<String> {
    let text = entry
        .strip_prefix("GPU-")
        .or_else(|| entry.strip_prefix("MIG-"))?;
    let mut digits = String::new();
    for letter in text.chars().filter(|letter| *letter != '-') {
        if digits.len() == UUID_DIGITS {
            break;
        }
        if !letter.is_ascii_hexdigit() {
            return None;
        }
        digits.push(letter.to_ascii_lowercase());
    }
    (!digits.is_empty()).then_some(digits)
}

fn whole_or_first_mig_device(gpu: &GpuFacts) -> CudaDevice {
    match gpu.mig.first() {
        Some(mig) => mig_device(gpu, mig),
        None => CudaDevice {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            instance: None,
        },
    }
}

fn mig_device(gpu: &GpuFacts, mig: &MigFacts) -> CudaDevice {
    CudaDevice {
        index: gpu.index,
        uuid: mig.uuid.clone(),
        instance: mig.instance,
    }
}

/// A process with a MIG device has only the first one, and no other device.
fn one_mig_device_or_whole_gpus(devices: Vec<CudaDevice>) -> Vec<CudaDevice> {
    match devices.iter().find(|device| device.is_mig_device()) {
        Some(mig) => vec![mig.clone()],
        None => devices,
    }
}

#[cfg(test)]
mod tests;
