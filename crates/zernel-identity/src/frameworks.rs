//! ML frameworks and libraries of a process, by the files that it maps.

use procfs::process::Process;

use crate::visit_mapped_regions;

/// Beginnings of file names, each with the name of its project. cuBLAS is listed because some programs compute with nothing
/// else, and few programs that multiply matrices on a GPU do no machine learning.
const FRAMEWORKS: [(&[u8], &str); 19] = [
    (b"libtorch", "PyTorch"),
    (b"libc10", "PyTorch"),
    (b"libtensorflow", "TensorFlow"),
    (b"_pywrap_tensorflow", "TensorFlow"),
    (b"libjax", "JAX"),
    (b"libxla", "JAX"),
    (b"xla_", "JAX"),
    (b"libpaddle", "PaddlePaddle"),
    (b"libmxnet", "MXNet"),
    (b"libmindspore", "MindSpore"),
    (b"libnvinfer", "TensorRT"),
    (b"libonnxruntime", "ONNX Runtime"),
    (b"onnxruntime_", "ONNX Runtime"),
    (b"libggml", "GGML"),
    (b"libllama", "GGML"),
    (b"libcudnn", "cuDNN"),
    (b"libnccl", "NCCL"),
    (b"libcublas", "cuBLAS"),
    (b"libcutlass", "CUTLASS"),
];

/// Names of the ML frameworks and libraries that a process maps as code, each once. Returns `None` if the mappings of the
/// process cannot be read.
pub(crate) fn read_frameworks(process: &Process) -> Option<Vec<String>> {
    let mut found: Vec<&str> = Vec::new();
    let visited = visit_mapped_regions(process, |region| {
        let framework = region.path.filter(|_| region.is_executable);
        if let Some(name) = framework.and_then(framework_of_path)
            && !found.contains(&name)
        {
            found.push(name);
        }
    });
    visited.ok()?;
    Some(found.into_iter().map(str::to_owned).collect())
}

fn framework_of_path(path: &[u8]) -> Option<&'static str> {
    let name = path.rsplit(|byte| *byte == b'/').next()?;
    let listed = FRAMEWORKS
        .iter()
        .find(|(prefix, _)| name.starts_with(prefix));
    listed.map(|(_, framework)| *framework)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frameworks_are_recognised_by_file_name() {
        for (path, framework) in [
            ("/usr/lib/libtorch_cpu.so", Some("PyTorch")),
            ("/venv/torch/lib/libc10_cuda.so (deleted)", Some("PyTorch")),
            (
                "/venv/jax_plugins/xla_cuda12/xla_cuda_plugin.so",
                Some("JAX"),
            ),
            ("/usr/lib/libcublasLt.so.13", Some("cuBLAS")),
            ("/opt/llama/libggml-cuda.so", Some("GGML")),
            ("/usr/lib/libcuda.so.580.159", None),
            ("/usr/lib/libcudart.so.13", None),
            ("/home/libtorch/simulation", None),
            ("/usr/lib/libcufft.so.12", None),
        ] {
            assert_eq!(framework_of_path(path.as_bytes()), framework, "{path}");
        }
    }

    #[test]
    fn this_process_maps_no_framework() {
        let process = Process::myself().unwrap();
        assert_eq!(read_frameworks(&process), Some(Vec::new()));
    }
}
