//! Point-to-point messages. All messages of a group move at the same time.

use std::sync::atomic::{Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

use zernel_softgpu::clock::transfer_time_ns;
use zernel_softgpu::device::nccl_bandwidth;

use crate::communicator::Communicator;
use crate::segment::{ChannelWord, MESSAGE_CHUNK_BYTES, OperationAborted, SharedSegment};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Send,
    Receive,
}

/// One rank's send or receive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message {
    pub(crate) direction: Direction,
    pub(crate) peer: usize,
    pub(crate) buffer: u64,
    pub(crate) bytes: usize,
}

/// The progress of a message that moves in chunks.
struct MessageTransfer {
    message: Message,
    moved_bytes: usize,
    /// Whether the sender has put all bytes into the channel, from which the receiver has yet to take the last chunk.
    is_sent_completely: bool,
    end: Option<u64>,
}

/// Moves all messages of a group, and returns the time at which the last one ends.
pub(crate) fn run_messages(
    communicator: &Communicator,
    messages: &[Message],
    start: u64,
) -> Result<u64, OperationAborted> {
    let segment = &communicator.segment;
    let mut transfers: Vec<MessageTransfer> =
        messages.iter().copied().map(MessageTransfer::new).collect();
    let waits_for_lost_rank = |transfers: &[MessageTransfer]| {
        let mut waiting = transfers.iter().filter(|transfer| transfer.end.is_none());
        waiting.any(|transfer| segment.has_rank_left_or_exited(transfer.message.peer))
    };
    loop {
        let bell = segment.change_count();
        let moved = move_chunk_of_each_transfer(segment, &mut transfers, start);
        if transfers.iter().all(|transfer| transfer.end.is_some()) {
            return Ok(transfers
                .iter()
                .filter_map(|transfer| transfer.end)
                .fold(start, u64::max));
        }
        match moved {
            true => segment.wake_ranks(),
            false => segment.wait_for_change(bell, || {
                communicator.check_abort(waits_for_lost_rank(&transfers))
            })?,
        }
    }
}

/// Moves one chunk of every message that can move. Messages in the same channel move one after the other.
fn move_chunk_of_each_transfer(
    segment: &SharedSegment,
    transfers: &mut [MessageTransfer],
    start: u64,
) -> bool {
    let mut busy = Vec::new();
    let mut moved = false;
    for transfer in transfers
        .iter_mut()
        .filter(|transfer| transfer.end.is_none())
    {
        let channel = (transfer.message.direction, transfer.message.peer);
        if !busy.contains(&channel) {
            moved |= transfer.send_or_receive_chunk(segment, start);
            busy.push(channel);
        }
    }
    moved
}

impl MessageTransfer {
    fn new(message: Message) -> Self {
        Self {
            message,
            moved_bytes: 0,
            is_sent_completely: false,
            end: None,
        }
    }

    fn send_or_receive_chunk(&mut self, segment: &SharedSegment, start: u64) -> bool {
        match self.message.direction {
            Direction::Send => self.send_next_chunk(segment, start),
            Direction::Receive => self.receive_next_chunk(segment, start),
        }
    }

    fn next_chunk_place(&self) -> (u64, usize) {
        let bytes = (self.message.bytes - self.moved_bytes).min(MESSAGE_CHUNK_BYTES);
        (self.message.buffer + self.moved_bytes as u64, bytes)
    }

    fn set_transfer_end(&mut self, sender_start: u64, receiver_start: u64) {
        let both_there = sender_start.max(receiver_start);
        let duration = transfer_time_ns(self.message.bytes as u64, nccl_bandwidth());
        self.end = Some(both_there + duration);
    }

    fn send_next_chunk(&mut self, segment: &SharedSegment, start: u64) -> bool {
        let word = |word| segment.channel_word(segment.own_rank(), self.message.peer, word);
        let sent = word(ChannelWord::Sent);
        let is_empty = sent.load(Relaxed) == word(ChannelWord::Received).load(Acquire);
        if !is_empty {
            return false;
        }
        if self.is_sent_completely {
            let receiver_start = word(ChannelWord::ReceiverStart).load(Relaxed);
            self.set_transfer_end(start, receiver_start);
            return true;
        }
        let (source, bytes) = self.next_chunk_place();
        word(ChannelWord::SenderStart).store(start, Relaxed);
        segment.send_chunk(self.message.peer, source, bytes);
        sent.fetch_add(1, Release);
        self.moved_bytes += bytes;
        self.is_sent_completely = self.moved_bytes == self.message.bytes;
        true
    }

    fn receive_next_chunk(&mut self, segment: &SharedSegment, start: u64) -> bool {
        let word = |word| segment.channel_word(self.message.peer, segment.own_rank(), word);
        let received = word(ChannelWord::Received);
        let is_empty = word(ChannelWord::Sent).load(Acquire) == received.load(Relaxed);
        if is_empty {
            return false;
        }
        let (destination, bytes) = self.next_chunk_place();
        let chunk = segment.received_chunk(self.message.peer, bytes);
        // SAFETY: the program's receive buffer, for which it vouches; not shared memory, so no overlap.
        unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), destination as *mut u8, bytes) };
        let sender_start = word(ChannelWord::SenderStart).load(Relaxed);
        word(ChannelWord::ReceiverStart).store(start, Relaxed);
        received.fetch_add(1, Release);
        self.moved_bytes += bytes;
        if self.moved_bytes == self.message.bytes {
            self.set_transfer_end(sender_start, start);
        }
        true
    }
}
