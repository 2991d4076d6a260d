//! What a process calls device 0: from its environment, the CUDA driver's rules and its container.
//!
//! The rules for `CUDA_VISIBLE_DEVICES` are those of the driver (580), found by asking it: a list is
//! of numbers or of UUIDs, as its first entry is; it ends at the first entry that names no device; one
//! that names a device twice leaves none. Numbers are read as C's `strtol` does, what follows
//! them is ignored. Of a UUID the first digits are enough. It was asked on a machine with one whole
//! GPU; that digits which several devices share name none, and that a process has no more than one part
//! of a divided GPU, is what NVIDIA's documentation says.

use serde::Serialize;

use super::{GpuFacts, MigFacts, MigInstance, device_nodes};
use crate::Identity;

/// Digits of a UUID.
const UUID_DIGITS: usize = 32;

/// A device as CUDA counts them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct VisibleDevice {
    /// The NVML index of the GPU.
    pub index: u32,
    /// The UUID of the GPU, or of the part of it that this is.
    pub uuid: String,
    /// Which part of it, if it is divided and NVML tells.
    pub instance: Option<MigInstance>,
}

impl VisibleDevice {
    /// Whether it is only a part of a GPU.
    #[must_use]
    pub fn is_mig_device(&self) -> bool {
        self.uuid.starts_with("MIG-")
    }
}

/// How the driver orders devices: `CUDA_DEVICE_ORDER`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceOrder {
    /// The fastest first, by a measure of the driver's own; its default. Of equal GPUs the order
    /// is that of the bus.
    #[default]
    FastestFirst,
    /// As on the PCI bus, and so as NVML.
    PciBusId,
}

impl DeviceOrder {
    /// The order that the variable's value asks for.
    #[must_use]
    pub fn parse(value: Option<&str>) -> Self {
        match value {
            Some("PCI_BUS_ID") => Self::PciBusId,
            _ => Self::FastestFirst,
        }
    }
}

/// Something that the translation takes for granted, and may be wrong in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Assumption {
    /// The GPUs are of different kinds, and the driver orders them as they are on the bus.
    BusOrder,
    /// Of a divided GPU that is not named by part, the first part is used.
    FirstPart,
    /// The process is in a container, and sees all GPUs: nothing says which it was given.
    WholeMachine,
    /// Slurm hides the GPUs that it did not give the job.
    SlurmHides,
    /// The environment could not be read, and names no devices.
    EmptyEnvironment,
}

/// The devices that a process can use, in the order of the numbers it calls them by.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct VisibleDevices {
    /// By CUDA ordinal.
    pub devices: Vec<VisibleDevice>,
    /// What was taken for granted.
    pub assumptions: Vec<Assumption>,
}

impl VisibleDevices {
    /// What `CUDA_VISIBLE_DEVICES` of this value leaves of the GPUs, in the driver's default order.
    #[must_use]
    pub fn parse(value: Option<&str>, gpus: &[GpuFacts]) -> Self {
        Self::parse_ordered(value, DeviceOrder::default(), gpus)
    }

    /// What `CUDA_VISIBLE_DEVICES` of this value leaves of the GPUs.
    #[must_use]
    pub fn parse_ordered(value: Option<&str>, order: DeviceOrder, gpus: &[GpuFacts]) -> Self {
        let mut gpus: Vec<_> = gpus.iter().collect();
        gpus.sort_by_key(|gpu| gpu.index);
        let by_uuid = value.is_some_and(is_uuid);
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
        visible.assume(
            Assumption::BusOrder,
            !by_uuid && order == DeviceOrder::FastestFirst && !same_model,
        );
        let names_mig_devices = value.is_some_and(|list| list.starts_with("MIG-"));
        visible.assume(
            Assumption::FirstPart,
            !names_mig_devices && gpus.iter().any(|gpu| gpu.mig_enabled),
        );
        visible
    }

    /// The devices of a process: what its container or Slurm has left of the machine's, and its
    /// environment of those.
    #[must_use]
    pub fn for_process(identity: &Identity, gpus: &[GpuFacts]) -> Self {
        Self::with_device_nodes(
            identity,
            gpus,
            device_nodes::visible_minors(identity).as_deref(),
        )
    }

    /// The same, given the numbers of the device nodes the process sees.
    fn with_device_nodes(identity: &Identity, gpus: &[GpuFacts], minors: Option<&[u32]>) -> Self {
        let list = identity.cuda_visible_devices.as_deref();
        let (reachable, assumption) = reachable_gpus(identity, gpus, minors);
        let (reachable, slurm) = restrict_to_slurm_gpus(identity, reachable);
        let order = DeviceOrder::parse(identity.cuda_device_order.as_deref());
        let mut visible = Self::parse_ordered(list, order, &reachable);
        visible.assumptions.extend(assumption);
        visible.assumptions.extend(slurm);
        visible.assume(Assumption::EmptyEnvironment, !identity.environment_read);
        visible
    }

    /// The NVML index of the GPU that CUDA device `ordinal` is or is part of.
    #[must_use]
    pub fn index(&self, ordinal: u32) -> Option<u32> {
        let device = self.devices.get(usize::try_from(ordinal).ok()?)?;
        Some(device.index)
    }

    fn assume(&mut self, assumption: Assumption, is_made: bool) {
        if is_made {
            self.assumptions.push(assumption);
        }
    }
}

/// The NVML index of what a process calls CUDA device `ordinal`. To say on what assumptions, ask
/// [`VisibleDevices::for_process`].
#[must_use]
pub fn ordinal_to_index(identity: &Identity, ordinal: u32, gpus: &[GpuFacts]) -> Option<u32> {
    VisibleDevices::for_process(identity, gpus).index(ordinal)
}

/// The GPUs within a process's reach: those with a device node; where that is not known, those that
/// its container asked for.
fn reachable_gpus(
    identity: &Identity,
    gpus: &[GpuFacts],
    minors: Option<&[u32]>,
) -> (Vec<GpuFacts>, Option<Assumption>) {
    if let Some(minors) = minors {
        let has_node = |gpu: &&GpuFacts| gpu.minor.is_none_or(|minor| minors.contains(&minor));
        return (gpus.iter().filter(has_node).cloned().collect(), None);
    }
    if identity.container.is_none() {
        return (gpus.to_vec(), None);
    }
    match requested_gpus(identity.nvidia_visible_devices.as_deref(), gpus) {
        Some(requested) => (requested, None),
        None => (gpus.to_vec(), Some(Assumption::WholeMachine)),
    }
}

/// What `NVIDIA_VISIBLE_DEVICES` asks a container runtime for, if it does: `all`, or indices and UUIDs.
/// `void`, `none` and paths say that the devices come in another way, or not at all.
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

/// `1`, `GPU-…`, `MIG-…`, or `1:0` for the first part of GPU 1.
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

/// What Slurm leaves of the GPUs. It sets `CUDA_VISIBLE_DEVICES` to the numbers it gave; if it also
/// hides the others, it counts from 0 instead. So other numbers than those given are such, unless one is too large for
/// that: then a rank was left with some of those given.
fn restrict_to_slurm_gpus(
    identity: &Identity,
    gpus: Vec<GpuFacts>,
) -> (Vec<GpuFacts>, Option<Assumption>) {
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
                && list.is_some_and(|list| !is_uuid(list) && all_below(list, numbers.len())) =>
        {
            let is_given = |gpu: &GpuFacts| numbers.contains(&gpu.minor.unwrap_or(gpu.index));
            let left = gpus.into_iter().filter(is_given).collect();
            (left, Some(Assumption::SlurmHides))
        }
        _ => (gpus, None),
    }
}

/// Whether no number of a list is one that nobody has who counts so many from 0.
fn all_below(list: &str, count: usize) -> bool {
    let mut numbers = list.split(',').filter_map(leading_number);
    numbers.all(|number| usize::try_from(number).is_ok_and(|number| number < count))
}

/// The devices of a list, as far as it is good.
fn select_devices(list: &str, find: impl Fn(&str) -> Option<VisibleDevice>) -> Vec<VisibleDevice> {
    let mut devices = Vec::new();
    for device in list.split(',').map_while(find) {
        if devices.contains(&device) {
            return Vec::new();
        }
        devices.push(device);
    }
    devices
}

fn find_by_ordinal(entry: &str, gpus: &[&GpuFacts]) -> Option<VisibleDevice> {
    let ordinal = usize::try_from(leading_number(entry)?).ok()?;
    gpus.get(ordinal).map(|gpu| whole_or_first_mig_device(gpu))
}

/// What `strtol` makes of it, if there are digits, in the 32 bits that the driver keeps.
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

fn is_uuid(list: &str) -> bool {
    list.starts_with("GPU-") || list.starts_with("MIG-")
}

/// The device whose UUID alone begins so. The prefix does not decide: the driver also finds GPUs under
/// `MIG-`.
fn find_by_uuid(entry: &str, gpus: &[&GpuFacts]) -> Option<VisibleDevice> {
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

/// `<uuid of the GPU>/<GPU instance>/<compute instance>`, as drivers before 470 name parts.
fn find_by_mig_path(path: &str, gpus: &[&GpuFacts]) -> Option<VisibleDevice> {
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

/// The digits after the prefix, small; hyphens do not matter, nor what follows a whole UUID.
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

fn whole_or_first_mig_device(gpu: &GpuFacts) -> VisibleDevice {
    match gpu.mig.first() {
        Some(mig) => mig_device(gpu, mig),
        None => VisibleDevice {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            instance: None,
        },
    }
}

fn mig_device(gpu: &GpuFacts, mig: &MigFacts) -> VisibleDevice {
    VisibleDevice {
        index: gpu.index,
        uuid: mig.uuid.clone(),
        instance: mig.instance,
    }
}

/// A process that has a part of a divided GPU has that one part, and no other device.
fn one_mig_device_or_whole_gpus(devices: Vec<VisibleDevice>) -> Vec<VisibleDevice> {
    match devices.iter().find(|device| device.is_mig_device()) {
        Some(mig) => vec![mig.clone()],
        None => devices,
    }
}

#[cfg(test)]
mod tests;
