//! Functions for stream capture and graphs.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zernel_softgpu::abi_arguments::{InArgument, OutArgument};
use zernel_softgpu::completion::Completion;
use zernel_softgpu::exports;
use zernel_softgpu::graph::{CapturePoint, Graph, GraphNode};
use zernel_softgpu::registry::{Registry, new_handle};
use zernel_softgpu::stream::StreamRole;
use zernel_softgpu::stream_work::StreamWork;
use zernel_softgpu::truth::LoggedSymbol;

use crate::context::{STREAMS, StreamObject, stream_of_handle};
use crate::driver::initialised_driver;
use crate::kernel::function_of_handle;
use crate::status::{
    CudaError, ILLEGAL_STATE, INVALID_HANDLE, INVALID_VALUE, Outcome, STREAM_CAPTURE_UNJOINED,
    STREAM_CAPTURE_UNMATCHED, STREAM_CAPTURE_UNSUPPORTED,
};
use crate::types::KernelNode;

static GRAPHS: Registry<GraphObject> = Registry::new();
static EXECUTABLE_GRAPHS: Registry<ExecutableGraph> = Registry::new();
static NEXT_CAPTURE_ID: AtomicU64 = AtomicU64::new(1);

/// A graph that can be launched. Launches of the same graph run one after another, even in different streams.
#[derive(Debug)]
struct ExecutableGraph {
    graph: Arc<Graph>,
    last_launch: Mutex<Arc<Completion>>,
}

impl ExecutableGraph {
    fn launch(&self, stream: &StreamObject, symbol: &'static LoggedSymbol) -> Outcome {
        let graph = StreamWork::Graph(Arc::clone(&self.graph));
        if stream.stream.is_capturing() {
            // A graph launched in a capturing stream becomes part of the captured graph, and is not launched itself.
            return stream.submit_or_capture(graph, symbol);
        }
        let launched = self.last_launch.lock();
        let mut last = launched.unwrap_or_else(PoisonError::into_inner);
        let end = Completion::with_unknown_end();
        stream.submit_or_capture(StreamWork::WaitForCompletion(Arc::clone(&last)), symbol)?;
        stream.submit_or_capture(graph, symbol)?;
        stream.submit_or_capture(StreamWork::SetCompletion(Arc::clone(&end)), symbol)?;
        *last = end;
        Ok(())
    }
}

/// A graph of the program, with a handle for each of its nodes.
#[derive(Debug, Default)]
struct GraphObject(Mutex<NamedGraph>);

#[derive(Debug, Default)]
struct NamedGraph {
    graph: Graph,
    handles: Vec<u64>,
}

impl GraphObject {
    fn new(graph: Graph) -> Arc<Self> {
        let handles = graph.nodes.iter().map(|_| new_handle()).collect();
        Arc::new(Self(Mutex::new(NamedGraph { graph, handles })))
    }

    fn lock_graph(&self) -> MutexGuard<'_, NamedGraph> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NamedGraph {
    fn add_node(
        &mut self,
        work: StreamWork,
        after: Vec<usize>,
        symbol: &'static LoggedSymbol,
    ) -> u64 {
        self.graph.nodes.push(GraphNode {
            work,
            symbol,
            predecessors: after,
        });
        self.handles.push(new_handle());
        self.handles[self.handles.len() - 1]
    }

    /// The indices of the nodes that `handles` refer to.
    fn node_indices(
        &self,
        handles: InArgument<u64>,
        count: usize,
    ) -> Result<Vec<usize>, CudaError> {
        let index_of = |position| {
            let wanted = handles.get_at(position)?;
            let index = self.handles.iter().position(|handle| *handle == wanted);
            index.ok_or(INVALID_VALUE)
        };
        (0..count).map(index_of).collect()
    }
}

fn graph_of_handle(handle: u64) -> Result<Arc<GraphObject>, CudaError> {
    initialised_driver()?;
    GRAPHS.get(handle).ok_or(INVALID_HANDLE)
}

fn instantiate_graph(executable: &OutArgument<u64>, handle: u64) -> Outcome {
    let graph = graph_of_handle(handle)?.lock_graph().graph.clone();
    let object = ExecutableGraph {
        graph: Arc::new(graph),
        last_launch: Mutex::new(Completion::with_known_end(0)),
    };
    Ok(executable.set(EXECUTABLE_GRAPHS.insert(Arc::new(object)))?)
}

/// The `CUgraphNodeType` of a graph node.
fn node_type(work: &StreamWork) -> i32 {
    match work {
        StreamWork::Kernel { .. } | StreamWork::External { .. } => 0,
        StreamWork::Copy { .. } => 1,
        StreamWork::Fill { .. } => 2,
        StreamWork::Host(_) => 3,
        StreamWork::Graph(_) => 4,
        StreamWork::SetCompletion(_) => 5,
        StreamWork::WaitForCompletion(_) => 6,
        StreamWork::Action(_) => 11,
    }
}

fn capture_info(
    call: &mut zernel_softgpu::truth::OpenCall,
    handle: u64,
    status: &OutArgument<i32>,
    id: &OutArgument<u64>,
) -> Outcome {
    let stream = stream_of_handle(call, handle)?;
    let capture = stream
        .stream
        .change_capture_point(|capture| capture.as_ref().map(|point| point.capture.id));
    status.set(i32::from(capture.is_some()))?;
    id.set_unless_null(capture.unwrap_or(0));
    Ok(())
}

exports! { "cuda" =>
    /// The capture mode makes no difference: no call is forbidden while another stream captures.
    per_thread(cuStreamBeginCapture_v2_ptsz)
    fn cuStreamBeginCapture_v2(call, handle: u64, mode: i32) -> Outcome {
        let stream = stream_of_handle(call, handle)?;
        if !(0..=2).contains(&mode) {
            return Err(INVALID_VALUE);
        }
        if stream.stream.role() == StreamRole::Legacy {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        stream.stream.change_capture_point(|capture| match capture {
            Some(_) => Err(ILLEGAL_STATE),
            None => {
                *capture = Some(CapturePoint::begin(NEXT_CAPTURE_ID.fetch_add(1, Relaxed), handle));
                Ok(())
            }
        })
    }

    per_thread(cuStreamEndCapture_ptsz)
    fn cuStreamEndCapture(call, handle: u64, captured: OutArgument<u64>) -> Outcome {
        let stream = stream_of_handle(call, handle)?;
        let point = stream.stream.change_capture_point(|capture| match capture {
            None => Err(ILLEGAL_STATE),
            Some(point) if point.capture.origin_stream != handle => Err(STREAM_CAPTURE_UNMATCHED),
            Some(_) => capture.take().ok_or(ILLEGAL_STATE),
        })?;
        for other in STREAMS.all() {
            other.stream.change_capture_point(|capture| {
                if capture.as_ref().is_some_and(|other| Arc::ptr_eq(&other.capture, &point.capture)) {
                    *capture = None;
                }
            });
        }
        if !point.is_after_all_nodes() {
            captured.set_unless_null(0);
            return Err(STREAM_CAPTURE_UNJOINED);
        }
        let graph = GRAPHS.insert(GraphObject::new(point.capture.captured_graph()));
        Ok(captured.set(graph)?)
    }

    per_thread(cuStreamIsCapturing_ptsz)
    fn cuStreamIsCapturing(call, handle: u64, status: OutArgument<i32>) -> Outcome {
        let stream = stream_of_handle(call, handle)?;
        Ok(status.set(i32::from(stream.stream.is_capturing()))?)
    }

    /// This function does not return the graph and the dependencies of a running capture.
    per_thread(cuStreamGetCaptureInfo_v2_ptsz)
    fn cuStreamGetCaptureInfo_v2(
        call, handle: u64, status: OutArgument<i32>, id: OutArgument<u64>, graph: OutArgument<u64>, dependencies: OutArgument<u64>,
        count: OutArgument<usize>,
    ) -> Outcome {
        graph.set_unless_null(0);
        dependencies.set_unless_null(0);
        count.set_unless_null(0);
        capture_info(call, handle, &status, &id)
    }

    per_thread(cuStreamGetCaptureInfo_v3_ptsz)
    fn cuStreamGetCaptureInfo_v3(
        call, handle: u64, status: OutArgument<i32>, id: OutArgument<u64>, graph: OutArgument<u64>,
        dependencies: OutArgument<u64>, edges: OutArgument<u64>, count: OutArgument<usize>,
    ) -> Outcome {
        graph.set_unless_null(0);
        dependencies.set_unless_null(0);
        edges.set_unless_null(0);
        count.set_unless_null(0);
        capture_info(call, handle, &status, &id)
    }

    fn cuThreadExchangeStreamCaptureMode(_call, mode: OutArgument<i32>) -> Outcome {
        initialised_driver()?;
        Ok(mode.set(0)?)
    }

    fn cuGraphCreate(_call, handle: OutArgument<u64>, flags: u32) -> Outcome {
        initialised_driver()?;
        match flags {
            0 => Ok(handle.set(GRAPHS.insert(GraphObject::new(Graph::default())))?),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuGraphDestroy(_call, handle: u64) -> Outcome {
        initialised_driver()?;
        GRAPHS.remove(handle).map(drop).ok_or(INVALID_HANDLE)
    }

    fn cuGraphAddKernelNode_v2(
        call, node: OutArgument<u64>, handle: u64, dependencies: InArgument<u64>, count: usize,
        parameters: InArgument<KernelNode>,
    ) -> Outcome {
        let parameters = parameters.get()?;
        let object = graph_of_handle(handle)?;
        let mut graph = object.lock_graph();
        let after = graph.node_indices(dependencies, count)?;
        // SAFETY: pointers in the C caller's structure, valid during the call as the whole structure is.
        let (arguments, extra) = unsafe { (InArgument::new(parameters.parameters), InArgument::new(parameters.extra)) };
        let kernel = match parameters.function {
            0 => parameters.kernel,
            function => function,
        };
        let work = function_of_handle(kernel)?.launch_work(arguments, extra)?;
        Ok(node.set(graph.add_node(work, after, call.symbol()))?)
    }

    fn cuGraphAddEmptyNode(
        call, node: OutArgument<u64>, handle: u64, dependencies: InArgument<u64>, count: usize,
    ) -> Outcome {
        let object = graph_of_handle(handle)?;
        let mut graph = object.lock_graph();
        let after = graph.node_indices(dependencies, count)?;
        let nothing = StreamWork::SetCompletion(Completion::with_unknown_end());
        Ok(node.set(graph.add_node(nothing, after, call.symbol()))?)
    }

    fn cuGraphGetNodes(_call, handle: u64, nodes: OutArgument<u64>, count: OutArgument<usize>) -> Outcome {
        let object = graph_of_handle(handle)?;
        let graph = object.lock_graph();
        if !nodes.is_null() {
            let room = count.get()?;
            for (index, node) in graph.handles.iter().take(room).enumerate() {
                nodes.set_at(index, *node)?;
            }
        }
        Ok(count.set(graph.handles.len())?)
    }

    fn cuGraphNodeGetType(_call, node: u64, kind: OutArgument<i32>) -> Outcome {
        initialised_driver()?;
        let has_it = |object: &GraphObject| object.lock_graph().handles.contains(&node);
        let (_, object) = GRAPHS.find(has_it).ok_or(INVALID_HANDLE)?;
        let graph = object.lock_graph();
        let index = graph.handles.iter().position(|handle| *handle == node).ok_or(INVALID_HANDLE)?;
        Ok(kind.set(node_type(&graph.graph.nodes[index].work))?)
    }

    fn cuGraphInstantiate_v2(
        _call, executable: OutArgument<u64>, handle: u64, error_node: OutArgument<u64>, _log: u64,
        _log_bytes: usize,
    ) -> Outcome {
        error_node.set_unless_null(0);
        instantiate_graph(&executable, handle)
    }

    fn cuGraphInstantiateWithFlags(
        _call, executable: OutArgument<u64>, handle: u64, _flags: u64,
    ) -> Outcome {
        instantiate_graph(&executable, handle)
    }

    per_thread(cuGraphUpload_ptsz)
    fn cuGraphUpload(call, executable: u64, stream_handle: u64) -> Outcome {
        call.object = executable;
        stream_of_handle(call, stream_handle)?;
        EXECUTABLE_GRAPHS.get(executable).map(drop).ok_or(INVALID_HANDLE)
    }

    per_thread(cuGraphLaunch_ptsz)
    fn cuGraphLaunch(call, executable: u64, stream_handle: u64) -> Outcome {
        call.object = executable;
        let stream = stream_of_handle(call, stream_handle)?;
        let executable = EXECUTABLE_GRAPHS.get(executable).ok_or(INVALID_HANDLE)?;
        executable.launch(&stream, call.symbol())
    }

    fn cuGraphExecDestroy(call, executable: u64) -> Outcome {
        call.object = executable;
        initialised_driver()?;
        EXECUTABLE_GRAPHS.remove(executable).map(drop).ok_or(INVALID_HANDLE)
    }
}
