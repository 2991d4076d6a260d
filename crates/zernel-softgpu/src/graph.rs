//! Graphs: work recorded once, with its order, and run many times.

use std::sync::{Arc, Mutex, PoisonError};

use crate::stream_work::StreamWork;
use crate::truth::LoggedSymbol;

/// A node of a graph: work, and the earlier nodes it comes after.
#[derive(Debug, Clone)]
pub struct GraphNode {
    /// What to do.
    pub work: StreamWork,
    /// The call that put it here.
    pub symbol: &'static LoggedSymbol,
    /// Indices of earlier nodes.
    pub predecessors: Vec<usize>,
}

/// Nodes in an order in which they can run: each comes after those it depends on.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// The nodes.
    pub nodes: Vec<GraphNode>,
}

impl Graph {
    /// Whether the end is known as soon as the start is known.
    #[must_use]
    pub fn is_immediate(&self) -> bool {
        self.nodes.iter().all(|node| node.work.is_immediate())
    }

    /// Runs all nodes, the first at `start`, with `execute` for each, and returns the last end.
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

/// A capture under way, shared by the streams that take part.
#[derive(Debug)]
pub struct GraphCapture {
    /// Unique among captures.
    pub id: u64,
    /// The stream that began it, and must end it.
    pub origin: u64,
    graph: Mutex<Graph>,
}

/// The position of a stream or event in a capture: after these nodes.
#[derive(Debug, Clone)]
pub struct CapturePoint {
    /// The capture.
    pub capture: Arc<GraphCapture>,
    /// Indices of nodes.
    pub last_nodes: Vec<usize>,
}

impl CapturePoint {
    /// The beginning of a new capture, by the stream of this handle.
    #[must_use]
    pub fn begin(id: u64, origin: u64) -> Self {
        let capture = GraphCapture {
            id,
            origin,
            graph: Mutex::default(),
        };
        Self {
            capture: Arc::new(capture),
            last_nodes: Vec::new(),
        }
    }

    /// Records `work` after this point, and moves the point behind it.
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

    /// Moves the point behind `other` as well.
    pub fn join_after(&mut self, other: &Self) {
        let new = other
            .last_nodes
            .iter()
            .filter(|index| !self.last_nodes.contains(index));
        let new: Vec<usize> = new.copied().collect();
        self.last_nodes.extend(new);
    }

    /// Whether everything captured comes before this point.
    #[must_use]
    pub fn is_after_everything(&self) -> bool {
        let graph = self.capture.lock_graph();
        let mut before = vec![false; graph.nodes.len()];
        self.last_nodes
            .iter()
            .for_each(|index| before[*index] = true);
        // Backwards, so that every node is visited after all nodes that depend on it.
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

    /// The captured graph.
    #[must_use]
    pub fn captured_graph(&self) -> Graph {
        self.lock_graph().clone()
    }
}
