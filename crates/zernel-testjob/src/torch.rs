//! A training loop that behaves like one of `PyTorch`: it announces its parts through functions of a library, and its
//! backward passes run on another thread.

use std::ffi::c_void;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use std::{fs, io, ptr, thread};

use libloading::Library;
use zernel_softgpu::install::built_libraries;
use zernel_softgpu_torch::EXPORTS;

use crate::driver::KernelLauncher;
use crate::loader::DurationJitter;
use crate::plan::JobPlan;
use crate::sys;

/// The name of the stand-in library in the folder of the job's libraries. Its functions announce parts of the loop.
pub(crate) const TORCH_LIBRARY_NAME: &str = "libtorch_cpu.so";

/// The name by which `PyTorch` announces a step of the AdamW optimizer.
pub(crate) const OPTIMIZER_STEP: &str = "Optimizer.step#AdamW.step";

/// A `std::string` of libstdc++ whose text is too long to be stored in the object itself.
#[repr(C)]
struct CxxString {
    text: *const u8,
    length: u64,
    capacity: [u64; 2],
}

/// Copies the stand-in library into `directory`.
pub(crate) fn install_torch_library(directory: &Path) -> io::Result<()> {
    let built = built_libraries()?.join("libzernel_softgpu_torch.so");
    fs::copy(built, directory.join(TORCH_LIBRARY_NAME)).map(|_| ())
}

/// Calls the function whose exported (mangled) name contains `name`.
fn call_library_function(
    library: &Library,
    name: &str,
    arguments: [*const c_void; 3],
) -> io::Result<()> {
    type Function = unsafe extern "C" fn(*const c_void, *const c_void, *const c_void);
    let exported = EXPORTS.iter().find(|exported| exported.contains(name));
    let exported =
        exported.ok_or_else(|| io::Error::other(format!("{TORCH_LIBRARY_NAME} has no {name}")))?;
    // SAFETY: the functions of the stand-in library return at once, and read nothing.
    unsafe {
        let function = library.get::<Function>(exported.as_bytes());
        let function = function.map_err(io::Error::other)?;
        function(arguments[0], arguments[1], arguments[2]);
    }
    Ok(())
}

pub(crate) fn load_torch_library(libraries: &Path) -> io::Result<Library> {
    // SAFETY: loading the stand-in library runs no code of its own.
    unsafe { Library::new(libraries.join(TORCH_LIBRARY_NAME)) }.map_err(io::Error::other)
}

fn announce_by_library(library: &Library, name: &str) -> io::Result<()> {
    let mut result = ptr::null::<c_void>();
    let string = CxxString {
        text: name.as_ptr(),
        length: name.len() as u64,
        capacity: [name.len() as u64, 0],
    };
    let place = (&raw mut result).cast();
    let arguments = [place, (&raw const string).cast(), ptr::null()];
    call_library_function(library, "record_function_enter_new", arguments)
}

/// Announces the parts of the loop, and passes backward passes to their thread.
pub(crate) struct TorchAnnouncer {
    library: Library,
    backward: BackwardThread,
}

impl TorchAnnouncer {
    pub(crate) fn start(
        libraries: &Path,
        launcher: KernelLauncher,
        plan: &JobPlan,
        seed: u64,
    ) -> io::Result<Self> {
        Ok(Self {
            library: load_torch_library(libraries)?,
            backward: BackwardThread::start(load_torch_library(libraries)?, launcher, plan, seed),
        })
    }

    /// Announces a part of the loop by its name.
    pub(crate) fn announce_part(&self, name: &str) -> io::Result<()> {
        announce_by_library(&self.library, name)
    }

    /// Announces the end of the part that was announced last.
    pub(crate) fn announce_end_of_part(&self) -> io::Result<()> {
        call_library_function(&self.library, "PythonRecordFunction", [ptr::null(); 3])
    }

    /// Calls a layer of a model.
    pub(crate) fn call_layer(&self) -> io::Result<()> {
        call_library_function(&self.library, "linear", [ptr::null(); 3])
    }

    /// Runs a backward pass on the backward thread, and waits until it is done.
    pub(crate) fn run_backward_pass(&self, launches: u32) -> io::Result<()> {
        let graph = &raw const *self;
        let engine = ptr::null();
        let arguments = [engine, (&raw const graph).cast(), ptr::null()];
        call_library_function(&self.library, "execute", arguments)?;
        call_library_function(&self.library, "thread_main", arguments)?;
        self.backward.run(launches)
    }
}

/// The thread that runs the backward passes of a rank.
struct BackwardThread {
    requests: Sender<u32>,
    results: Receiver<io::Result<()>>,
}

impl BackwardThread {
    fn start(library: Library, launcher: KernelLauncher, plan: &JobPlan, seed: u64) -> Self {
        let (requests, orders) = channel();
        let (done, results) = channel();
        let plan = plan.clone();
        // The name that PyTorch gives the threads of its backward passes.
        let thread = thread::Builder::new().name("pt_autograd_0".to_owned());
        let body = move || {
            let mut jitter = DurationJitter::new(seed ^ 1, plan.jitter);
            let peers = (plan.gloo_us > 0).then(GlooPeers::start);
            while let Ok(launches) = orders.recv() {
                let pass = launcher.make_context_current().and_then(|()| {
                    for _ in 0..launches {
                        sys::burn_cpu(jitter.duration_around(plan.launch_us));
                        launcher.launch(jitter.duration_around(plan.kernel_us))?;
                        if plan.updates_in_backward {
                            announce_by_library(&library, OPTIMIZER_STEP)?;
                        }
                    }
                    match &peers {
                        Some(peers) => {
                            peers.reduce_through_cpu(&library, jitter.duration_around(plan.gloo_us))
                        }
                        None => Ok(()),
                    }
                });
                if done.send(pass).is_err() {
                    break;
                }
            }
        };
        // If the thread has ended, the first backward pass returns an error.
        let _ = thread.spawn(body);
        Self { requests, results }
    }

    fn run(&self, launches: u32) -> io::Result<()> {
        let ended = |_| io::Error::other("the thread of backward passes has ended");
        self.requests.send(launches).map_err(|_| ended(()))?;
        self.results.recv().map_err(|_| ended(()))?
    }
}

/// A thread that stands for the other ranks. It answers a request after a given time.
struct GlooPeers {
    requests: Sender<Duration>,
    answers: Receiver<()>,
}

impl GlooPeers {
    fn start() -> Self {
        let (requests, orders) = channel();
        let (answer, answers) = channel();
        thread::spawn(move || {
            while let Ok(time) = orders.recv() {
                thread::sleep(time);
                if answer.send(()).is_err() {
                    break;
                }
            }
        });
        Self { requests, answers }
    }

    /// Simulates the reduction of gradients through the CPU (gloo), which takes `time`.
    fn reduce_through_cpu(&self, library: &Library, time: Duration) -> io::Result<()> {
        let ended = |_| io::Error::other("the peers have ended");
        call_library_function(library, "ProcessGroupGloo9allreduce", [ptr::null(); 3])?;
        self.requests.send(time).map_err(|_| ended(()))?;
        call_library_function(library, "finalize_backward", [ptr::null(); 3])?;
        self.answers.recv().map_err(|_| ended(()))
    }
}
