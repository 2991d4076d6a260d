/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The state of one task, shared by every BPF object and by userspace.
 *
 * This is its only definition in C. A test compares the Rust mirror (zernel-phase, shared.rs) with
 * the BTF of this file. Include the kernel's types first: kernel.h, or vmlinux.h.
 */
#ifndef ZERNEL_TASK_STATE_H
#define ZERNEL_TASK_STATE_H

/* Zeroed memory is Unknown. */
enum zernel_phase {
	ZERNEL_UNKNOWN,
	ZERNEL_DATA_LOADING,
	ZERNEL_GPU_COMPUTE,
	ZERNEL_NCCL_COLLECTIVE,
	ZERNEL_OPTIMIZER_STEP,
	ZERNEL_PHASES, /* how many there are */
};

/* In place of the number of a GPU: unknown. */
enum zernel_gpu {
	ZERNEL_NO_GPU = 0xffffffffU,
};

enum zernel_task_flags {
	ZERNEL_TASK_IS_ML = 1 << 0,
	ZERNEL_TASK_NCCL_ACTIVE = 1 << 1,
	ZERNEL_TASK_IS_LOADER = 1 << 2, /* it loads data for a trainer */
	ZERNEL_TASK_IS_SAMPLED = 1 << 3, /* its phase is that of the sampled rule */
};

/* A share of time in units of 1/65536: every value from 0 to 65536 is exact as an f32. */
enum zernel_q16 {
	ZERNEL_Q16_ONE = 1 << 16,
};

/* What a thread does outside of probed calls. */
enum zernel_activity {
	ZERNEL_ACTIVITY_IDLE,
	ZERNEL_ACTIVITY_LOADING,
	ZERNEL_ACTIVITY_RECEIVING_BATCH, /* without a GPU: its block for data is over, its end is not seen */
	ZERNEL_ACTIVITY_COMPUTING, /* launched, copied or synced last */
	ZERNEL_ACTIVITY_BACKWARD, /* in a backward pass, which may run on another thread */
	ZERNEL_ACTIVITY_UPDATING, /* in an optimizer step */
	ZERNEL_ACTIVITY_OTHER_WORK, /* writes a checkpoint */
	ZERNEL_ACTIVITY_AFTER_UPDATE, /* its optimizer step is over; it may wait for its next batch */
	ZERNEL_ACTIVITY_COMPILING,
};

enum zernel_tracker_flags {
	ZERNEL_IN_SYNC = 1 << 0,
	ZERNEL_IN_COLLECTIVE = 1 << 1,
	ZERNEL_COLLECTIVE_QUEUED = 1 << 2, /* nothing but a collective since the last sync */
	ZERNEL_COLLECTIVE_LAUNCHED = 1 << 3, /* the collective it is in has launched its kernel */
	ZERNEL_LAUNCHED_SINCE_SYNC = 1 << 4,
	ZERNEL_IS_BLOCKED = 1 << 5, /* blocked */
	ZERNEL_WAIT_UNDECIDED = 1 << 6, /* blocked for data or for another thread */
	ZERNEL_UNDECIDED = 1 << 7, /* a copy shows that it got data since undecided_since_ns */
	ZERNEL_TRAINING_THREAD = 1 << 8, /* a training thread: it copies, syncs or marks */
	ZERNEL_ANNOUNCES_DATA = 1 << 9, /* announces when it gets a batch */
	ZERNEL_ANNOUNCES_UPDATES = 1 << 10, /* announces its optimizer steps */
	ZERNEL_MAY_UPDATE = 1 << 11, /* back from backward; an optimizer step may follow */
	ZERNEL_USES_GPU = 1 << 12, /* has launched, copied or synced */
	ZERNEL_IS_QUEUED = 1 << 13, /* runnable and not running: deadlines stand still */
	ZERNEL_AWAITS_DATA_AFTER_UPDATE = 1 << 14, /* its last wait was for data */
	ZERNEL_IN_UPDATE = 1 << 15, /* in an optimizer step whose end will be seen */
};

/* What phase_tracker.h remembers of a thread. */
struct zernel_tracker {
	__u64 now_ns; /* the latest time reported up to */
	__u64 deadline_ns; /* when the phase is given up */
	__u64 activity_until_ns; /* when the activity is given up */
	__u64 sync_since_ns; /* when the sync it is in was entered */
	__u64 collective_since_ns; /* when the collective it is in was entered */
	__u64 last_call_evidence_ns; /* when the call it is in was last shown */
	__u64 wait_since_ns; /* when it blocked */
	__u64 wait_until_ns; /* when its phase is given up if it is still blocked */
	__u64 activity_until_ns_before_wait; /* activity_until_ns before it blocked */
	__u64 undecided_since_ns; /* start of what may be loading, or end of the backward pass */
	__u64 last_marker_ns; /* last optimizer marker or announced step */
	__u64 update_end_ns; /* end of its last optimizer step; 0: none was seen */
	__u64 queued_since_ns; /* when it was preempted */
	__u64 last_own_event_ns; /* its last event, other than losing its CPU or getting it back */
	__u32 lost_leave_events; /* calls ended by other evidence than their leave */
	__u32 lost_enter_events; /* leaves of calls never seen to begin */
	__u32 late_events; /* events stamped before one already applied */
	__u32 expired_phases; /* phases given up at their deadline */
	__u16 flags; /* enum zernel_tracker_flags */
	__u8 activity; /* enum zernel_activity */
	__u8 activity_before_wait; /* the activity before it blocked */
	__u8 sees_update_ends; /* the ends of its optimizer steps are seen */
	__u8 copies_to_host; /* the sync it is in is a copy to the host, which may not wait */
	__u8 reserved[2];
};

struct zernel_task_state {
	__u64 phase_word; /* see zernel_pack_phase_word() */
	__u64 class_word; /* see class.h */
	__u64 class_until_ns; /* when the class is given up */
	__u64 last_gpu_sync_ns; /* when the task last returned from a GPU sync; 0: never */
	__u64 cpu_burst_ns; /* length of the current CPU burst; 0: not on a CPU */
	__u64 phase_ns[ZERNEL_PHASES]; /* time spent in the phases already left */
	__u32 pid; /* the task */
	__u32 tgid; /* its process */
	__u32 trainer; /* the process it works for: its own, or the one it loads data for */
	__u32 gpu_id; /* ZERNEL_NO_GPU: not known */
	__u32 futex_waits; /* recent futex waits */
	__u32 io_wait_q16; /* share of recent time spent waiting for I/O */
	__u32 candidate_streak; /* how often in a row the raw result was the candidate */
	__u8 candidate_phase; /* the last raw result of the sampled rule */
	__u8 gpu_utilization; /* 0 to 100 */
	__u8 flags; /* enum zernel_task_flags */
	__u8 reserved;
	struct zernel_tracker tracker; /* not for readers */
};

/*
 * The phase word: phase, sequence and start in one u64, written with one store, so that a reader on
 * another CPU never sees half of it. The sums in phase_ns are written before the word: a reader
 * that wants both may find the interval that the word shows as open in the sum already.
 *
 *   bits  0-3   phase
 *   bits  4-15  sequence, one more at every change
 *   bits 16-63  start, in units of 1024 ns: enough for nine years of uptime
 *
 * Phase boundaries are rounded down to that unit everywhere, so the times of all phases still add
 * up.
 */
enum zernel_word_bits {
	ZERNEL_WORD_PHASE_BITS = 4,
	ZERNEL_WORD_SEQUENCE_BITS = 12,
	ZERNEL_WORD_START_SHIFT = ZERNEL_WORD_PHASE_BITS + ZERNEL_WORD_SEQUENCE_BITS,
	ZERNEL_WORD_UNIT_SHIFT = 10,
};

static inline __u64 zernel_pack_phase_word(__u8 phase, __u16 sequence, __u64 start_ns)
{
	__u64 phase_bits = phase & ((1U << ZERNEL_WORD_PHASE_BITS) - 1);
	__u64 sequence_bits = sequence & ((1U << ZERNEL_WORD_SEQUENCE_BITS) - 1);

	return start_ns >> ZERNEL_WORD_UNIT_SHIFT << ZERNEL_WORD_START_SHIFT |
	       sequence_bits << ZERNEL_WORD_PHASE_BITS | phase_bits;
}

static inline __u8 zernel_word_phase(__u64 word)
{
	__u8 phase = word & ((1U << ZERNEL_WORD_PHASE_BITS) - 1);

	return phase < ZERNEL_PHASES ? phase : ZERNEL_UNKNOWN;
}

static inline __u16 zernel_word_sequence(__u64 word)
{
	return word >> ZERNEL_WORD_PHASE_BITS & ((1U << ZERNEL_WORD_SEQUENCE_BITS) - 1);
}

static inline __u64 zernel_word_start_ns(__u64 word)
{
	return word >> ZERNEL_WORD_START_SHIFT << ZERNEL_WORD_UNIT_SHIFT;
}

/* Leaves the current phase for `phase`, recording the time it took. */
static inline void zernel_transition(struct zernel_task_state *task, __u8 phase, __u64 now_ns)
{
	__u64 word = task->phase_word;
	__u8 left = zernel_word_phase(word);
	__u64 start_ns = zernel_word_start_ns(word);
	__u64 now_word = zernel_pack_phase_word(phase, zernel_word_sequence(word) + 1, now_ns);
	__u64 end_ns = zernel_word_start_ns(now_word);

	if (start_ns && end_ns > start_ns) {
		__u64 sum = task->phase_ns[left] + (end_ns - start_ns);

		task->phase_ns[left] = sum < end_ns - start_ns ? ~0ULL : sum;
	}
	*(volatile __u64 *)&task->phase_word = now_word;
}

#endif
