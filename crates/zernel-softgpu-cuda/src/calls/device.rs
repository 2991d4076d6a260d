//! Functions that describe devices.

use std::ffi::c_char;

use zernel_softgpu::abi_arguments::{OutArgument, TextArgument};
use zernel_softgpu::{device, exports};

use crate::driver::initialised_driver;
use crate::status::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, Outcome};

exports! { "cuda" =>
    fn cuDeviceGetCount(_call, count: OutArgument<i32>) -> Outcome {
        Ok(count.set(initialised_driver()?.device_count() as i32)?)
    }

    fn cuDeviceGet(_call, device: OutArgument<i32>, ordinal: i32) -> Outcome {
        initialised_driver()?.device(ordinal)?;
        Ok(device.set(ordinal)?)
    }

    fn cuDeviceGetName(_call, name: OutArgument<c_char>, capacity: i32, device: i32) -> Outcome {
        initialised_driver()?.device(device)?;
        let capacity = usize::try_from(capacity).map_err(|_| INVALID_VALUE)?;
        name.set_text(device::DEVICE_NAME, capacity)?;
        Ok(())
    }

    fn cuDeviceTotalMem_v2(_call, bytes: OutArgument<usize>, device: i32) -> Outcome {
        Ok(bytes.set(initialised_driver()?.device(device)?.total_memory() as usize)?)
    }

    fn cuDeviceGetUuid(_call, uuid: OutArgument<[u8; 16]>, device: i32) -> Outcome {
        Ok(uuid.set(device::uuid_of_device(initialised_driver()?.device(device)?.index()))?)
    }

    fn cuDeviceGetUuid_v2(_call, uuid: OutArgument<[u8; 16]>, device: i32) -> Outcome {
        Ok(uuid.set(device::uuid_of_device(initialised_driver()?.device(device)?.index()))?)
    }

    fn cuDeviceGetPCIBusId(_call, text: OutArgument<c_char>, capacity: i32, device: i32) -> Outcome {
        let capacity = usize::try_from(capacity).map_err(|_| INVALID_VALUE)?;
        let address = device::pci_bus_id(initialised_driver()?.device(device)?.index());
        match text.set_text(&address, capacity)? {
            true => Ok(()),
            false => Err(INVALID_VALUE),
        }
    }

    fn cuDeviceGetByPCIBusId(_call, device: OutArgument<i32>, text: TextArgument) -> Outcome {
        let wanted = text.get()?;
        let driver = initialised_driver()?;
        let mut ordinals = 0..driver.device_count() as i32;
        let found = ordinals.find(|ordinal| {
            let known = driver.device(*ordinal).map(|device| device::pci_bus_id(device.index()));
            known.is_ok_and(|known| known.eq_ignore_ascii_case(&wanted))
        });
        Ok(device.set(found.ok_or(INVALID_DEVICE)?)?)
    }

    fn cuDeviceGetAttribute(_call, value: OutArgument<i32>, attribute: i32, device: i32) -> Outcome {
        let index = initialised_driver()?.device(device)?.index();
        Ok(value.set(attribute_value(attribute, index).ok_or(INVALID_VALUE)?)?)
    }

    fn cuDeviceComputeCapability(_call, major: OutArgument<i32>, minor: OutArgument<i32>, device: i32) -> Outcome {
        initialised_driver()?.device(device)?;
        major.set(device::COMPUTE_CAPABILITY.0)?;
        Ok(minor.set(device::COMPUTE_CAPABILITY.1)?)
    }

    /// All simulated devices live in the same host memory, so each can access the memory of each other.
    fn cuDeviceCanAccessPeer(_call, can_access: OutArgument<i32>, device: i32, peer: i32) -> Outcome {
        initialised_driver()?.device(device)?;
        initialised_driver()?.device(peer)?;
        Ok(can_access.set(i32::from(device != peer))?)
    }

    fn cuDeviceGetP2PAttribute(
        _call, value: OutArgument<i32>, attribute: i32, device: i32, peer: i32,
    ) -> Outcome {
        initialised_driver()?.device(device)?;
        initialised_driver()?.device(peer)?;
        match attribute {
            // The attributes between two devices: performance rank, access, native atomics, array access.
            1 => Ok(value.set(0)?),
            2 => Ok(value.set(1)?),
            3 | 4 => Ok(value.set(0)?),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuDeviceGetLuid(_call, _luid: u64, _mask: u64, _device: i32) -> Outcome {
        Err(NOT_SUPPORTED)
    }
}

/// The value of a `CUdevice_attribute` of a simulated device; 0 for a feature that it lacks.
fn attribute_value(attribute: i32, index: usize) -> Option<i32> {
    const KNOWN_ATTRIBUTES: std::ops::RangeInclusive<i32> = 1..=143;
    let value = match attribute {
        // Attributes for the limits of a launch.
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        8 => 49152,
        9 => 65536,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65536,
        39 => 2048,
        81 | 97 => 233_472,
        106 => 32,
        // Attributes for clocks in kHz, number of units, bus width and cache.
        13 => device::SM_CLOCK_MHZ as i32 * 1000,
        16 => device::MULTIPROCESSOR_COUNT,
        36 => device::MEMORY_CLOCK_MHZ as i32 * 1000,
        37 => 5120,
        38 => 50 << 20,
        40 => 3,
        // Attributes for the alignment of textures and surfaces.
        14 | 30 => 512,
        51 => 32,
        // Attributes for features that the device has: concurrent kernels and copies, host mapping, unified addressing,
        // priorities, managed memory, cooperative launch, host registration, virtual memory, pools.
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 95 | 99 | 102 | 115 => 1,
        // Attributes for the PCI address.
        33 => device::pci_bus(index) as i32,
        75 => device::COMPUTE_CAPABILITY.0,
        76 => device::COMPUTE_CAPABILITY.1,
        87 => 2,
        // Attribute for the number of memory synchronisation domains.
        126 => 4,
        _ => 0,
    };
    KNOWN_ATTRIBUTES.contains(&attribute).then_some(value)
}
