//! Graphs: work that is recorded once, with its order, and run many times.

use std::sync::{Arc, Mutex, PoisonError};

use crate::stream_work::StreamWork;
use crate::truth::LoggedSymbol;

/// A node of a graph: a piece of work, and the earlier nodes that it waits for.
#[derive(Debug, Clone)]
pub struct GraphNode {
    /// The work of the node.
    pub work: StreamWork,
    /// The exported function that added the node.
    pub symbol: &'static LoggedSymbol,
    /// Indices of the nodes that must end before this node starts.
    pub predecessors: Vec<usize>,
}

/// A graph. Its nodes are in an order in which they can run: each node comes after the nodes that it waits for.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// The nodes of the graph, in an order in which they can run.
    pub nodes: Vec<GraphNode>,
}

impl Graph {
    /// Whether the end of the graph is known as soon as its start is known.
    #[must_use]
    pub fn has_known_duration(&self) -> bool {
        self.nodes.iter().all(|node| node.work.has_known_duration())
    }

    /// Runs all nodes with `execute`, the first at the time `start`, and returns the end time of the last.
    pub(crate) fn run_nodes(
        &self,
        start: u64,
        mut execute: impl FnMut(&GraphNode, u64) -> u64,
    ) -> u64 {
        let mut ends = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let ready = node
                .predecessors
                .iter()
                .map(|index| ends[*index])
                .fold(start, u64::max);
            ends.push(execute(node, ready));
        }
        ends.into_iter().fold(start, u64::max)
    }
}

/// A running capture of a graph, shared by the streams that take part in it.
#[derive(Debug)]
pub struct GraphCapture {
    /// The number of the capture, which no other capture has.
    pub id: u64,
    /// The handle of the stream that began the capture, and that must end it.
    pub origin_stream: u64,
    graph: Mutex<Graph>,
}

/// The position of a stream or an event in a capture: after which nodes it comes.
#[derive(Debug, Clone)]
pub struct CapturePoint {
    /// The capture that the position belongs to.
    pub capture: Arc<GraphCapture>,
    /// Indices of the nodes that come right before this position.
    pub last_nodes: Vec<usize>,
}

impl CapturePoint {
    /// Begins a capture, which the stream with the handle `origin_stream` will end.
    #[must_use]
    pub fn begin(id: u64, origin_stream: u64) -> Self {
        let capture = GraphCapture {
            id,
            origin_stream,
            graph: Mutex::default(),
        };
        Self {
            capture: Arc::new(capture),
            last_nodes: Vec::new(),
        }
    }

    /// Records `work` at this position, and moves the position behind it.
    pub fn record_work(&mut self, work: StreamWork, symbol: &'static LoggedSymbol) {
        let mut graph = self.capture.lock_graph();
        let index = graph.nodes.len();
        let after = std::mem::replace(&mut self.last_nodes, vec![index]);
        graph.nodes.push(GraphNode {
            work,
            symbol,
            predecessors: after,
        });
    }

    /// Moves the position so that it comes after `other` too.
    pub fn add_predecessors_of(&mut self, other: &Self) {
        let new = other
            .last_nodes
            .iter()
            .filter(|index| !self.last_nodes.contains(index));
        let new: Vec<usize> = new.copied().collect();
        self.last_nodes.extend(new);
    }

    /// Whether every node of the capture comes before this position.
    #[must_use]
    pub fn is_after_all_nodes(&self) -> bool {
        let graph = self.capture.lock_graph();
        let mut before = vec![false; graph.nodes.len()];
        self.last_nodes
            .iter()
            .for_each(|index| before[*index] = true);
        // Nodes are visited backwards, so that every node is visited after all nodes that wait for it.
        graph.nodes.iter().enumerate().rev().all(|(index, node)| {
            node.predecessors
                .iter()
                .for_each(|earlier| before[*earlier] = true);
            before[index]
        })
    }
}

impl GraphCapture {
    fn lock_graph(&self) -> std::sync::MutexGuard<'_, Graph> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The graph that was captured so far.
    #[must_use]
    pub fn captured_graph(&self) -> Graph {
        self.lock_graph().clone()
    }
}
