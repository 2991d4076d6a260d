//! Structures of the driver API, as `cuda.h` lays them out.

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct MemoryLocation {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

impl MemoryLocation {
    pub(crate) fn is_device(self) -> bool {
        self.kind == 1
    }
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AccessDescription {
    pub(crate) location: MemoryLocation,
    /// The access: 0 none, 1 read, 3 read and write.
    pub(crate) flags: i32,
}

/// `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AllocationProperties {
    /// The only kind of allocation is 1, pinned memory.
    pub(crate) allocation_type: i32,
    pub(crate) handle_types: i32,
    pub(crate) location: MemoryLocation,
    pub(crate) windows: u64,
    pub(crate) flags: u64,
}

/// `CUmemPoolProps`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolProperties {
    pub(crate) allocation_type: i32,
    pub(crate) handle_types: i32,
    pub(crate) location: MemoryLocation,
    pub(crate) windows: u64,
    pub(crate) maximum: usize,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 54],
}

/// `CUDA_MEMCPY2D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Copy2D {
    pub(crate) source: CopySide2D,
    pub(crate) destination: CopySide2D,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// One side of a `CUDA_MEMCPY2D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct CopySide2D {
    pub(crate) x: usize,
    pub(crate) y: usize,
    /// The type of the memory: 1 host, 2 device, 3 array, 4 unified.
    pub(crate) kind: i32,
    pub(crate) host: u64,
    pub(crate) device: u64,
    pub(crate) array: u64,
    pub(crate) pitch: usize,
}

/// `CUDA_MEMCPY3D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Copy3D {
    pub(crate) source: CopySide3D,
    pub(crate) destination: CopySide3D,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
}

/// One side of a `CUDA_MEMCPY3D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct CopySide3D {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) z: usize,
    pub(crate) level: usize,
    /// The type of the memory, with the numbers of a [`CopySide2D`].
    pub(crate) kind: i32,
    pub(crate) host: u64,
    pub(crate) device: u64,
    pub(crate) array: u64,
    pub(crate) reserved: u64,
    pub(crate) pitch: usize,
    pub(crate) height: usize,
}

/// `CUlaunchConfig`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct LaunchConfiguration {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) stream: u64,
    pub(crate) attributes: u64,
    pub(crate) attribute_count: u32,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct KernelNode {
    pub(crate) function: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) parameters: *const *const u64,
    pub(crate) extra: *const u64,
    pub(crate) kernel: u64,
    pub(crate) context: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn argument_struct_sizes_match_cuda_header() {
        assert_eq!(size_of::<AccessDescription>(), 12);
        assert_eq!(size_of::<AllocationProperties>(), 32);
        assert_eq!(size_of::<PoolProperties>(), 88);
        assert_eq!(size_of::<Copy2D>(), 128);
        assert_eq!(size_of::<LaunchConfiguration>(), 56);
        assert_eq!(size_of::<KernelNode>(), 72);
    }
}
