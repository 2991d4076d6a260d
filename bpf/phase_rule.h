/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The sampled rule in the kernel: the twin of zernel-phase's classify() and of its debouncing.
 *
 * BPF has no floating point. Fractions and thresholds are the bit patterns of f32 values, compared
 * as integers. The comparison is exact for every pair, NaN and negative values included.
 */
#ifndef ZERNEL_PHASE_RULE_H
#define ZERNEL_PHASE_RULE_H

#include "task_state.h"

struct zernel_phase_config {
	__u64 optimizer_burst_max_ns;
	__u32 io_wait_threshold_f32;
	__u32 io_wait_half_threshold_f32; /* half of the above, computed by userspace */
	__u32 phase_stability_count;
	__u8 gpu_idle_threshold;
	__u8 gpu_active_threshold;
	__u8 nccl_detection_enabled;
	__u8 reserved;
};

/* The input of the rule. */
struct zernel_phase_sample {
	__u64 last_gpu_sync_ns;
	__u64 cpu_burst_ns;
	__u32 io_wait_f32;
	__u32 futex_waits;
	__u8 gpu_utilization;
	__u8 is_ml;
	__u8 nccl_active;
	__u8 reserved[5];
};

/* The rank of an f32 in the order of all f32 values; -0 and +0 have the same. */
static inline __s64 zernel_f32_rank(__u32 bits)
{
	__s64 magnitude = bits & 0x7fffffff;

	return bits >> 31 ? -magnitude : magnitude;
}

static inline int zernel_f32_is_nan(__u32 bits)
{
	return (bits & 0x7fffffff) > 0x7f800000;
}

/* Whether a > b, by the bit patterns of two f32 values; false if one is NaN. */
static inline int zernel_f32_greater(__u32 a, __u32 b)
{
	return !zernel_f32_is_nan(a) && !zernel_f32_is_nan(b) &&
	       zernel_f32_rank(a) > zernel_f32_rank(b);
}

/* The f32 bit pattern of a fraction in units of 1/65536. */
static inline __u32 zernel_f32_from_q16(__u32 q16)
{
	__u32 highest = 0;

	if (q16 > ZERNEL_Q16_ONE)
		q16 = ZERNEL_Q16_ONE;
	if (!q16)
		return 0;
	for (__u32 step = 16; step; step >>= 1)
		if (q16 >> (highest + step))
			highest += step;
	return (127 - 16 + highest) << 23 | (q16 << (23 - highest) & 0x7fffff);
}

static inline __u8 zernel_classify(const struct zernel_phase_config *config,
				   const struct zernel_phase_sample *sample)
{
	__u8 gpu = sample->gpu_utilization;
	int gpu_idle = gpu < config->gpu_idle_threshold;
	int gpu_active = gpu > config->gpu_active_threshold;
	int gpu_between = gpu > config->gpu_idle_threshold && gpu < config->gpu_active_threshold;

	if (!sample->is_ml)
		return ZERNEL_UNKNOWN;
	if (config->nccl_detection_enabled && sample->nccl_active && sample->futex_waits > 0)
		return ZERNEL_NCCL_COLLECTIVE;
	if (zernel_f32_greater(sample->io_wait_f32, config->io_wait_threshold_f32) && gpu_idle)
		return ZERNEL_DATA_LOADING;
	if (gpu_active && sample->cpu_burst_ns == 0)
		return ZERNEL_GPU_COMPUTE;
	if (sample->cpu_burst_ns > 0 && sample->cpu_burst_ns < config->optimizer_burst_max_ns &&
	    sample->last_gpu_sync_ns > 0)
		return ZERNEL_OPTIMIZER_STEP;
	if (zernel_f32_greater(sample->io_wait_f32, config->io_wait_half_threshold_f32) &&
	    gpu_between)
		return ZERNEL_DATA_LOADING;
	return ZERNEL_UNKNOWN;
}

/* The phase to report after one more raw result. */
static inline __u8 zernel_debounce(const struct zernel_phase_config *config,
				   struct zernel_task_state *task, __u8 raw)
{
	if (!(task->flags & ZERNEL_TASK_IS_ML)) {
		task->candidate_streak = 0;
		return raw;
	}
	if (task->candidate_phase != raw) {
		task->candidate_phase = raw;
		task->candidate_streak = 0;
	}
	if (task->candidate_streak != ~0U)
		task->candidate_streak++;
	if (task->candidate_streak >= config->phase_stability_count)
		return raw;
	return zernel_word_phase(task->phase_word);
}

/* Reads the input of the rule from the state of a task. */
static inline void zernel_read_sample(struct zernel_phase_sample *sample,
				      const struct zernel_task_state *task)
{
	*sample = (struct zernel_phase_sample){
		.last_gpu_sync_ns = task->last_gpu_sync_ns,
		.cpu_burst_ns = task->cpu_burst_ns,
		.io_wait_f32 = zernel_f32_from_q16(task->io_wait_q16),
		.futex_waits = task->futex_waits,
		.gpu_utilization = task->gpu_utilization,
		.is_ml = task->flags & ZERNEL_TASK_IS_ML,
		.nccl_active = !!(task->flags & ZERNEL_TASK_NCCL_ACTIVE),
	};
}

/* Classifies a sample of a task, debounces, and moves the task to the reported phase. */
static inline void zernel_report_sample(const struct zernel_phase_config *config,
					struct zernel_task_state *task,
					const struct zernel_phase_sample *sample, __u64 now_ns)
{
	__u8 phase = zernel_debounce(config, task, zernel_classify(config, sample));

	if (phase != zernel_word_phase(task->phase_word))
		zernel_transition(task, phase, now_ns);
}

/* Samples one task. */
static inline void zernel_detect(const struct zernel_phase_config *config,
				 struct zernel_task_state *task, __u64 now_ns)
{
	struct zernel_phase_sample sample;

	zernel_read_sample(&sample, task);
	zernel_report_sample(config, task, &sample, now_ns);
}

#endif
