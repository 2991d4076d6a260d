//! Small mistakes in the C rules, each of which must be noticed.

use std::path::Path;
use std::{env, fs};

use libbpf_cargo::SkeletonBuilder;

/// Small mistakes in the C headers: header, its text, the mutated text.
pub(crate) const MUTANTS: [(&str, &str, &str); 168] = [
    ("phase_rule.h", "gpu_idle = gpu <", "gpu_idle = gpu <="),
    ("phase_rule.h", "gpu_active = gpu >", "gpu_active = gpu >="),
    (
        "phase_rule.h",
        "gpu > config->gpu_idle_threshold &&",
        "gpu >= config->gpu_idle_threshold &&",
    ),
    (
        "phase_rule.h",
        "&& gpu < config->gpu_active_threshold",
        "&& gpu <= config->gpu_active_threshold",
    ),
    ("phase_rule.h", "if (!sample->is_ml)", "if (0)"),
    ("phase_rule.h", "config->nccl_detection_enabled && ", ""),
    (
        "phase_rule.h",
        "sample->futex_waits > 0",
        "sample->futex_waits > 1",
    ),
    (
        "phase_rule.h",
        "config->io_wait_threshold_f32) && gpu_idle",
        "config->io_wait_half_threshold_f32) && gpu_idle",
    ),
    (
        "phase_rule.h",
        "sample->cpu_burst_ns == 0",
        "sample->cpu_burst_ns <= 1",
    ),
    (
        "phase_rule.h",
        "sample->cpu_burst_ns < config",
        "sample->cpu_burst_ns <= config",
    ),
    (
        "phase_rule.h",
        "sample->last_gpu_sync_ns > 0",
        "sample->last_gpu_sync_ns > 1",
    ),
    (
        "phase_rule.h",
        "config->io_wait_half_threshold_f32)",
        "config->io_wait_threshold_f32)",
    ),
    ("phase_rule.h", "> 0x7f800000", ">= 0x7f800000"),
    (
        "phase_rule.h",
        "bits >> 31 ? -magnitude : magnitude",
        "bits >> 31 ? ~magnitude : magnitude",
    ),
    (
        "phase_rule.h",
        "task->candidate_streak >= config",
        "task->candidate_streak > config",
    ),
    ("phase_rule.h", "127 - 16 + highest", "127 - 15 + highest"),
    (
        "task_state.h",
        "zernel_word_sequence(word) + 1",
        "zernel_word_sequence(word) + 2",
    ),
    ("task_state.h", "? ~0ULL : sum", "? sum : sum"),
    (
        "task_state.h",
        "WORD_UNIT_SHIFT = 10",
        "WORD_UNIT_SHIFT = 9",
    ),
    (
        "activity.h",
        "return config->optimizer_max_ns;",
        "return config->loading_max_ns;",
    ),
    (
        "activity.h",
        "case ZERNEL_ACTIVITY_OTHER_WORK:\n\t\treturn config->launching_max_ns;",
        "case ZERNEL_ACTIVITY_OTHER_WORK:\n\t\treturn config->loading_max_ns;",
    ),
    (
        "activity.h",
        "tracker->now_ns < tracker->activity_until_ns;",
        "1;",
    ),
    (
        "phase_tracker.h",
        "\tif (zernel_works_outside_steps(tracker))\n\t\treturn;\n\tzernel_end_loading",
        "\tzernel_end_loading",
    ),
    (
        "phase_tracker.h",
        "\tif (zernel_works_outside_steps(tracker))\n\t\treturn;\n\tif (zernel_may_have_loaded",
        "\tif (zernel_may_have_loaded",
    ),
    (
        "phase_tracker.h",
        "\tif (zernel_works_outside_steps(tracker))\n\t\treturn;\n\tzernel_attribute_time_to_forward",
        "\tzernel_attribute_time_to_forward",
    ),
    (
        "phase_tracker.h",
        "\tzernel_attribute_time_to_forward(task);\n\t/* Another",
        "\t/* Another",
    ),
    (
        "phase_tracker.h",
        "\tif (in_update && zernel_lacks_backward(task))\n\t\tzernel_attribute_time_to_forward(task);\n",
        "",
    ),
    (
        "phase_tracker.h",
        "if (in_update && zernel_lacks_backward(task))",
        "if (in_update)",
    ),
    (
        "phase_tracker.h",
        "tracker->last_marker_ns > start_ns ? tracker->last_marker_ns : start_ns",
        "tracker->last_marker_ns",
    ),
    (
        "phase_tracker.h",
        "\ttracker->last_marker_ns = tracker->now_ns;\n\tzernel_announce(config, task, ZERNEL_ACTIVITY_UPDATING,\n",
        "\tzernel_announce(config, task, ZERNEL_ACTIVITY_UPDATING,\n",
    ),
    (
        "phase_tracker.h",
        "tracker->activity == ZERNEL_ACTIVITY_BACKWARD ||\n\t\t\t       tracker->flags & ZERNEL_MAY_UPDATE",
        "tracker->activity == ZERNEL_ACTIVITY_BACKWARD",
    ),
    (
        "waits.h",
        "tracker->activity == ZERNEL_ACTIVITY_IDLE && event == ZERNEL_UNBLOCK_AFTER_LAUNCHES &&",
        "tracker->activity == ZERNEL_ACTIVITY_IDLE &&",
    ),
    (
        "waits.h",
        "!zernel_is_part_of_step(activity) && !(tracker->flags & ZERNEL_TRAINING_THREAD)",
        "0",
    ),
    (
        "waits.h",
        "ZERNEL_ANNOUNCES_DATA || !zernel_is_part_of_step(activity))",
        "ZERNEL_ANNOUNCES_DATA)",
    ),
    (
        "activity.h",
        "case ZERNEL_ACTIVITY_COMPILING:\n\t\treturn config->sync_max_ns;",
        "case ZERNEL_ACTIVITY_COMPILING:\n\t\treturn config->loading_max_ns;",
    ),
    (
        "phase_tracker.h",
        "updates ? ZERNEL_ACTIVITY_UPDATING : ZERNEL_ACTIVITY_COMPUTING",
        "ZERNEL_ACTIVITY_COMPUTING",
    ),
    (
        "activity.h",
        "case ZERNEL_ACTIVITY_RECEIVING_BATCH:\n\t\treturn config->short_wait_max_ns;",
        "case ZERNEL_ACTIVITY_RECEIVING_BATCH:\n\t\treturn config->loading_max_ns;",
    ),
    (
        "phase_tracker.h",
        "tracker->last_call_evidence_ns, config->collective_max_ns",
        "tracker->last_call_evidence_ns, config->sync_max_ns",
    ),
    (
        "waits.h",
        "config->short_wait_max_ns :\n\t\t       config->blocked_max_ns",
        "config->short_wait_max_ns :\n\t\t       config->sync_max_ns",
    ),
    (
        "waits.h",
        "event == ZERNEL_BLOCK_SLEEP && computes &&",
        "computes &&",
    ),
    (
        "waits.h",
        "event == ZERNEL_BLOCK_SLEEP && computes &&",
        "event == ZERNEL_BLOCK_SLEEP &&",
    ),
    (
        "waits.h",
        "computes && !zernel_in_call(tracker) ?",
        "computes ?",
    ),
    (
        "waits.h",
        "tracker->activity == ZERNEL_ACTIVITY_COMPUTING ||\n\t\t       tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE;",
        "tracker->activity == ZERNEL_ACTIVITY_COMPUTING;",
    ),
    (
        "phase_tracker.h",
        "tracker->now_ns < tracker->deadline_ns",
        "tracker->now_ns <= tracker->deadline_ns",
    ),
    (
        "phase_tracker.h",
        "tracker->now_ns >= tracker->deadline_ns",
        "tracker->now_ns > tracker->deadline_ns",
    ),
    (
        "phase_tracker.h",
        "at_ns < task->tracker.now_ns",
        "at_ns <= task->tracker.now_ns",
    ),
    (
        "phase_tracker.h",
        "tracker->flags & ZERNEL_IN_SYNC && tracker->sync_since_ns <= at_ns",
        "tracker->flags & ZERNEL_IN_SYNC && tracker->sync_since_ns < at_ns",
    ),
    (
        "phase_tracker.h",
        "tracker->collective_since_ns <= at_ns",
        "tracker->collective_since_ns < at_ns",
    ),
    (
        "phase_tracker.h",
        "last_marker_ns < config->optimizer_launch_max_ns",
        "last_marker_ns <= config->optimizer_launch_max_ns",
    ),
    (
        "waits.h",
        "return activity == ZERNEL_ACTIVITY_IDLE ? ZERNEL_ACTIVITY_IDLE : ZERNEL_ACTIVITY_LOADING;",
        "return ZERNEL_ACTIVITY_LOADING;",
    ),
    (
        "waits.h",
        "waited_ns >= config->short_wait_max_ns",
        "waited_ns > config->short_wait_max_ns",
    ),
    (
        "activity.h",
        "return activity != ZERNEL_ACTIVITY_LOADING;",
        "return 1;",
    ),
    (
        "waits.h",
        "tracker->last_call_evidence_ns += waited_ns;",
        "tracker->last_call_evidence_ns = tracker->now_ns;",
    ),
    ("waits.h", "\t\ttracker->flags |= ZERNEL_UNDECIDED;", ""),
    (
        "waits.h",
        "event != ZERNEL_UNBLOCK_AFTER_LAUNCHES ||\n\t     tracker",
        "1 ||\n\t     tracker",
    ),
    (
        "phase_tracker.h",
        "if (!(tracker->flags & ZERNEL_LAUNCHED_SINCE_SYNC))",
        "if (1)",
    ),
    (
        "phase_tracker.h",
        "!(tracker->flags & ZERNEL_COLLECTIVE_LAUNCHED)",
        "1",
    ),
    (
        "phase_tracker.h",
        "tracker->activity_until_ns <= tracker->now_ns",
        "tracker->activity_until_ns < tracker->now_ns",
    ),
    (
        "phase_tracker.h",
        "zernel_transition(task, phase, at_ns)",
        "zernel_transition(task, phase, tracker->now_ns)",
    ),
    (
        "waits.h",
        "since_ns > start_ns ? since_ns : start_ns",
        "task->tracker.now_ns",
    ),
    (
        "phase_tracker.h",
        "zernel_transition(task, ZERNEL_OPTIMIZER_STEP, tracker->undecided_since_ns)",
        "zernel_transition(task, ZERNEL_OPTIMIZER_STEP, tracker->now_ns)",
    ),
    ("waits.h", "tracker->flags |= ZERNEL_MAY_UPDATE;", ""),
    ("phase_tracker.h", "tracker->flags |= may_update;", ""),
    (
        "phase_tracker.h",
        "if (tracker->flags & ZERNEL_MAY_UPDATE)",
        "if (0)",
    ),
    (
        "phase_tracker.h",
        "(tracker->flags & announces) == announces",
        "1",
    ),
    (
        "waits.h",
        "if (tracker->flags & ZERNEL_ANNOUNCES_DATA || !",
        "if (!",
    ),
    (
        "phase_tracker.h",
        "if (!(tracker->flags & ZERNEL_ANNOUNCES_UPDATES) || follows_backward)",
        "if (1)",
    ),
    (
        "phase_tracker.h",
        "(tracker->flags & ZERNEL_ANNOUNCES_UPDATES ||",
        "(0 ||",
    ),
    (
        "waits.h",
        "activity == ZERNEL_ACTIVITY_UPDATING && !(tracker->flags & ZERNEL_ANNOUNCES_UPDATES)",
        "0",
    ),
    (
        "waits.h",
        "if (activity == ZERNEL_ACTIVITY_RECEIVING_BATCH)",
        "if (0)",
    ),
    (
        "waits.h",
        "uses_batch ? ZERNEL_ACTIVITY_RECEIVING_BATCH : ZERNEL_ACTIVITY_LOADING",
        "ZERNEL_ACTIVITY_LOADING",
    ),
    (
        "waits.h",
        "    !(tracker->flags & ZERNEL_TRAINING_THREAD))",
        "    0)",
    ),
    (
        "phase_tracker.h",
        "zernel_in_call(tracker) ? ZERNEL_ACTIVITY_IDLE :",
        "0 ? ZERNEL_ACTIVITY_IDLE :",
    ),
    (
        "phase_tracker.h",
        "tracker->flags & ZERNEL_MAY_UPDATE && !zernel_in_call(tracker)",
        "tracker->flags & ZERNEL_MAY_UPDATE",
    ),
    (
        "phase_tracker.h",
        "ZERNEL_LAUNCHED_SINCE_SYNC | trains);",
        "trains);",
    ),
    (
        "phase_tracker.h",
        "tracker->flags & ZERNEL_USES_GPU ? 0 : ZERNEL_TRAINING_THREAD;",
        "ZERNEL_TRAINING_THREAD;",
    ),
    (
        "phase_tracker.h",
        "\tzernel_set_activity(config, tracker, ZERNEL_ACTIVITY_IDLE, tracker->now_ns);\n",
        "",
    ),
    (
        "phase_tracker.h",
        "\tzernel_end_wait(config, &task->tracker, event);\n",
        "",
    ),
    (
        "phase_tracker.h",
        "\tzernel_end_run_delay(&task->tracker);\n",
        "",
    ),
    (
        "waits.h",
        "tracker->last_call_evidence_ns += queued_ns;",
        "",
    ),
    (
        "phase_tracker.h",
        "|| tracker->flags & ZERNEL_IS_QUEUED)",
        ")",
    ),
    ("class.h", "wakes_up ? ZERNEL_CLASS_CRITICAL :", ""),
    ("class.h", "if (role == ZERNEL_ROLE_LOADER)", "if (0)"),
    ("class.h", "&& phase != ZERNEL_UNKNOWN", ""),
    ("class.h", "is_loader ? ZERNEL_CLASS_NO_DEADLINE :", ""),
    ("class.h", "now_ns < until_ns", "now_ns <= until_ns"),
    ("class.h", "!before || ", ""),
    ("class.h", "is_sampled ? phase == ZERNEL_GPU_COMPUTE :", ""),
    ("class.h", "is_sampled || flags", "flags"),
    ("class.h", "if (is_sampled)", "if (0)"),
    (
        "waits.h",
        "||\n\t     tracker->flags & ZERNEL_ANNOUNCES_UPDATES))",
        "))",
    ),
    (
        "waits.h",
        "if (!(tracker->flags & ZERNEL_UNDECIDED) ||\n",
        "if (1 ||\n",
    ),
    (
        "waits.h",
        "(activity == ZERNEL_ACTIVITY_UPDATING || activity == ZERNEL_ACTIVITY_AFTER_UPDATE) &&",
        "0 &&",
    ),
    (
        "phase_tracker.h",
        "\tzernel_end_loading(tracker);\n\ttracker->flags |= flags;",
        "\ttracker->flags |= flags;",
    ),
    (
        "phase_tracker.h",
        "\tzernel_end_loading(tracker);\n\tzernel_set_activity",
        "\tzernel_set_activity",
    ),
    (
        "waits.h",
        "(activity == ZERNEL_ACTIVITY_UPDATING || activity == ZERNEL_ACTIVITY_AFTER_UPDATE) &&",
        "activity == ZERNEL_ACTIVITY_UPDATING &&",
    ),
    (
        "waits.h",
        "||\n\t       tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE;",
        ";",
    ),
    (
        "phase_tracker.h",
        "\tzernel_attribute_time_to_update(task);\n\tzernel_announce(config, task, ZERNEL_ACTIVITY_AFTER_UPDATE",
        "\tzernel_announce(config, task, ZERNEL_ACTIVITY_AFTER_UPDATE",
    ),
    (
        "waits.h",
        "case ZERNEL_BLOCK_REQUEST:\n\t\treturn ZERNEL_ACTIVITY_IDLE;\n",
        "",
    ),
    (
        "waits.h",
        "if (tracker->flags & ZERNEL_IN_UPDATE &&\n\t\t    event == ZERNEL_UNBLOCK_AFTER_LAUNCHES)",
        "if (0)",
    ),
    (
        "waits.h",
        "ZERNEL_IN_UPDATE &&\n\t\t    event == ZERNEL_UNBLOCK_AFTER_LAUNCHES)",
        "ZERNEL_IN_UPDATE)",
    ),
    (
        "phase_tracker.h",
        "if (tracker->sees_update_ends)\n\t\ttracker",
        "tracker",
    ),
    (
        "phase_tracker.h",
        "\tif (zernel_is_in_announced_update(tracker)) {",
        "\tif (0) {",
    ),
    (
        "phase_tracker.h",
        "tracker->activity == ZERNEL_ACTIVITY_UPDATING && !in_update",
        "tracker->activity == ZERNEL_ACTIVITY_UPDATING",
    ),
    (
        "phase_tracker.h",
        "\tif (zernel_is_in_announced_update(tracker))\n\t\treturn;\n",
        "",
    ),
    (
        "phase_tracker.h",
        "tracker->sees_update_ends = 1;\n\ttracker->flags &= ~ZERNEL_IN_UPDATE;",
        "tracker->sees_update_ends = 1;",
    ),
    (
        "phase_tracker.h",
        "case ZERNEL_DATA_BEGIN:\n\t\ttask->tracker.flags &= ~ZERNEL_IN_UPDATE;\n",
        "case ZERNEL_DATA_BEGIN:\n",
    ),
    (
        "waits.h",
        " &&\n\t\t    !zernel_is_in_announced_update(tracker))",
        ")",
    ),
    (
        "waits.h",
        "ZERNEL_ANNOUNCES_DATA || zernel_is_in_announced_update(tracker))",
        "ZERNEL_ANNOUNCES_DATA)",
    ),
    (
        "phase_tracker.h",
        "if (zernel_in_call(tracker) || (tracker->flags & ZERNEL_UNDECIDED",
        "if ((tracker->flags & ZERNEL_UNDECIDED",
    ),
    (
        "phase_tracker.h",
        "|| (tracker->flags & ZERNEL_UNDECIDED && !awaits_batch))",
        ")",
    ),
    (
        "phase_tracker.h",
        "tracker->last_own_event_ns > start_ns ? tracker->last_own_event_ns : start_ns",
        "tracker->last_own_event_ns",
    ),
    (
        "phase_tracker.h",
        "event != ZERNEL_PREEMPT && event != ZERNEL_RESUME",
        "1",
    ),
    (
        "phase_tracker.h",
        "~ZERNEL_UNDECIDED;\n\t\tzernel_attribute_time_to_loading(task);\n",
        "~ZERNEL_UNDECIDED;\n",
    ),
    (
        "phase_tracker.h",
        "tracker->activity == ZERNEL_ACTIVITY_COMPILING || tracker->activity == ZERNEL_ACTIVITY_IDLE",
        "1",
    ),
    (
        "phase_tracker.h",
        "tracker->activity == ZERNEL_ACTIVITY_COMPILING || tracker->activity == ZERNEL_ACTIVITY_IDLE",
        "tracker->activity == ZERNEL_ACTIVITY_COMPILING",
    ),
    (
        "waits.h",
        " &&\n\t\t\t\t  tracker->sees_update_ends);",
        ");",
    ),
    (
        "phase_tracker.h",
        "tracker->flags & computes ? ZERNEL_ACTIVITY_COMPUTING : ZERNEL_ACTIVITY_IDLE",
        "ZERNEL_ACTIVITY_COMPUTING",
    ),
    (
        "awaited.h",
        "\t\tzernel_attribute_wait_to_compile(task);\n",
        "",
    ),
    (
        "awaited.h",
        "zernel_in_call(tracker) ||\n\t    tracker->activity == ZERNEL_ACTIVITY_LOADING",
        "tracker->activity == ZERNEL_ACTIVITY_LOADING",
    ),
    (
        "awaited.h",
        "!(tracker->flags & ZERNEL_IS_BLOCKED) || zernel_in_call(tracker) ||\n",
        "zernel_in_call(tracker) ||\n",
    ),
    (
        "awaited.h",
        "tracker->activity == ZERNEL_ACTIVITY_LOADING ||\n\t    zernel_word_phase",
        "zernel_word_phase",
    ),
    (
        "awaited.h",
        "tracker->wait_since_ns = tracker->now_ns;\n\ttracker->activity_until_ns_before_wait =\n",
        "tracker->activity_until_ns_before_wait =\n",
    ),
    (
        "awaited.h",
        "tracker->undecided_since_ns = tracker->now_ns;\n\tzernel_transition",
        "zernel_transition",
    ),
    (
        "activity.h",
        "activity != ZERNEL_ACTIVITY_OTHER_WORK && activity != ZERNEL_ACTIVITY_COMPILING",
        "activity != ZERNEL_ACTIVITY_OTHER_WORK",
    ),
    ("phase_tracker.h", "&& !awaits_batch)", ")"),
    (
        "phase_tracker.h",
        "\tif (awaits_batch)\n\t\tzernel_set_activity(config, tracker, ZERNEL_ACTIVITY_COMPUTING, tracker->now_ns);\n",
        "",
    ),
    (
        "waits.h",
        "undecided_since_ns >= config->short_wait_max_ns",
        "undecided_since_ns > config->short_wait_max_ns",
    ),
    (
        "waits.h",
        "\tif (tracker->flags & ZERNEL_ANNOUNCES_DATA)\n\t\treturn;\n\ttracker->undecided_since_ns",
        "\ttracker->undecided_since_ns",
    ),
    (
        "phase_tracker.h",
        "if (zernel_may_hold_batch(config, tracker))\n\t\tzernel_set_activity",
        "if (0)\n\t\tzernel_set_activity",
    ),
    (
        "phase_tracker.h",
        "\tif (zernel_may_hold_batch(config, tracker))\n\t\treturn;\n\tif (tracker->sees",
        "\tif (tracker->sees",
    ),
    (
        "phase_tracker.h",
        "\tif (zernel_may_hold_batch(config, tracker))\n\t\treturn;\n\t/* What",
        "\t/* What",
    ),
    ("phase_tracker.h", "\ttracker->update_end_ns = 0;\n", ""),
    (
        "phase_tracker.h",
        "if (tracker->sees_update_ends && !in_update)",
        "if (tracker->sees_update_ends)",
    ),
    (
        "phase_tracker.h",
        "\tif (tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE || follows_update) {\n",
        "\tif (follows_update) {\n",
    ),
    (
        "phase_tracker.h",
        "ZERNEL_ACTIVITY_AFTER_UPDATE || follows_update) {\n",
        "ZERNEL_ACTIVITY_AFTER_UPDATE) {\n",
    ),
    (
        "phase_tracker.h",
        "return tracker->flags & ZERNEL_IN_SYNC && tracker->activity == ZERNEL_ACTIVITY_COMPUTING &&",
        "return tracker->activity == ZERNEL_ACTIVITY_COMPUTING &&",
    ),
    (
        "phase_tracker.h",
        "update_end_ns < config->short_wait_max_ns",
        "update_end_ns <= config->short_wait_max_ns",
    ),
    (
        "phase_tracker.h",
        "\tzernel_begin_undecided_time(config, tracker);\n\ttracker->update_end_ns",
        "\ttracker->update_end_ns",
    ),
    (
        "phase_tracker.h",
        "\tif (zernel_may_have_loaded(config, tracker)) {\n",
        "\tif (1) {\n",
    ),
    (
        "phase_tracker.h",
        "\t\tif (task->tracker.activity == ZERNEL_ACTIVITY_AFTER_UPDATE)\n",
        "\t\tif (0)\n",
    ),
    (
        "waits.h",
        "if (event == ZERNEL_BLOCK_IO && zernel_is_launching(tracker))",
        "if (0)",
    ),
    (
        "waits.h",
        "&&\n\t       tracker->flags & ZERNEL_LAUNCHED_SINCE_SYNC;",
        ";",
    ),
    (
        "waits.h",
        "\t\treturn zernel_is_launching(tracker);\n",
        "\t\treturn 0;\n",
    ),
    (
        "waits.h",
        " &&\n\t    zernel_word_phase(task->phase_word) != ZERNEL_DATA_LOADING)",
        ")",
    ),
    (
        "waits.h",
        "\t\tzernel_attribute_time_to_loading(task);\n\t\ttracker->activity_before_wait",
        "\t\ttracker->activity_before_wait",
    ),
    (
        "waits.h",
        "\t\ttracker->activity_before_wait = ZERNEL_ACTIVITY_LOADING;\n",
        "",
    ),
    (
        "waits.h",
        "(event != ZERNEL_BLOCK_FUTEX || zernel_may_have_loaded(config, tracker))",
        "1",
    ),
    (
        "waits.h",
        "event != ZERNEL_BLOCK_FUTEX || zernel_may_have_loaded(config, tracker)",
        "event != ZERNEL_BLOCK_FUTEX",
    ),
    (
        "waits.h",
        "if (!(tracker->flags & ZERNEL_UNDECIDED) ||\n\t\t    tracker->wait_since_ns <=",
        "if (!(tracker->flags & ZERNEL_UNDECIDED) ||\n\t\t    tracker->wait_since_ns <",
    ),
    (
        "awaited.h",
        "\t\tzernel_attribute_wait_to_collective(config, task);\n",
        "",
    ),
    (
        "awaited.h",
        "\t\tzernel_attribute_wait_to_data(config, task);\n",
        "",
    ),
    (
        "awaited.h",
        "zernel_in_call(tracker) || announced ||",
        "zernel_in_call(tracker) ||",
    ),
    (
        "awaited.h",
        "tracker->activity == ZERNEL_ACTIVITY_BACKWARD ||\n\t    ",
        "",
    ),
    (
        "awaited.h",
        "tracker->activity == ZERNEL_ACTIVITY_LOADING || tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE) {",
        "tracker->activity == ZERNEL_ACTIVITY_AFTER_UPDATE) {",
    ),
    (
        "awaited.h",
        "~ZERNEL_AWAITS_DATA_AFTER_UPDATE",
        "~(ZERNEL_WAIT_UNDECIDED | ZERNEL_AWAITS_DATA_AFTER_UPDATE)",
    ),
    (
        "awaited.h",
        "\ttracker->flags &= ~ZERNEL_AWAITS_DATA_AFTER_UPDATE;\n",
        "",
    ),
    (
        "awaited.h",
        "wait_since_ns < config->short_wait_max_ns)",
        "wait_since_ns <= config->short_wait_max_ns)",
    ),
    (
        "awaited.h",
        "if (!(tracker->flags & ZERNEL_UNDECIDED))\n\t\t",
        "",
    ),
    (
        "awaited.h",
        "if (tracker->flags & ZERNEL_ANNOUNCES_UPDATES)\n\t\ttracker->flags |= ZERNEL_AWAITS",
        "tracker->flags |= ZERNEL_AWAITS",
    ),
    (
        "phase_tracker.h",
        "now_ns - tracker->sync_since_ns < config->short_wait_max_ns",
        "now_ns - tracker->sync_since_ns <= config->short_wait_max_ns",
    ),
    ("phase_tracker.h", "\ttracker->flags |= queued;\n", ""),
    (
        "phase_tracker.h",
        "\tif (tracker->flags & ZERNEL_IN_COLLECTIVE)\n\t\treturn;\n\tzernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC);\n\ttracker->sync_since_ns = tracker->now_ns;\n\ttracker->last_call_evidence_ns",
        "\tzernel_end_calls_without_leave(tracker, ZERNEL_IN_SYNC);\n\ttracker->sync_since_ns = tracker->now_ns;\n\ttracker->last_call_evidence_ns",
    ),
    (
        "phase_tracker.h",
        "zernel_transition(task, phase, tracker->sync_since_ns);",
        "zernel_transition(task, phase, tracker->now_ns);",
    ),
    (
        "phase_tracker.h",
        "phase = zernel_in_copy_to_host(tracker) ? zernel_word_phase(task->phase_word) :",
        "phase = 0 ? zernel_word_phase(task->phase_word) :",
    ),
    ("phase_tracker.h", "\ttracker->copies_to_host = 0;\n", ""),
    (
        "phase_tracker.h",
        "return zernel_in_copy_to_host(tracker) && tracker->sync_since_ns <= at_ns;",
        "return 0;",
    ),
    (
        "phase_tracker.h",
        "\ttracker->now_ns = tracker->sync_since_ns;\n",
        "",
    ),
];

/// Compiles the twin with one text of one header replaced.
pub(crate) fn build_mutant(header: &str, from: &str, to: &str) -> Vec<u8> {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "activity.h",
        "awaited.h",
        "btf.h",
        "class.h",
        "kernel.h",
        "phase_rule.h",
        "phase_tracker.h",
        "task_maps.h",
        "task_state.h",
        "tracker_event.h",
        "waits.h",
    ] {
        let mut text = fs::read_to_string(project.join("../../bpf").join(name)).unwrap();
        if name == header {
            assert_eq!(text.matches(from).count(), 1, "{header} says {from:?} once");
            text = text.replace(from, to);
        }
        fs::write(folder.path().join(name), text).unwrap();
    }
    let object = folder.path().join("mutant.bpf.o");
    SkeletonBuilder::new()
        .source(project.join("src/twin/phase_twin.bpf.c"))
        .obj(&object)
        .clang(env::var("BPF_CLANG").unwrap_or_else(|_| "clang".into()))
        .clang_args(["-I".as_ref(), folder.path().as_os_str()])
        .build()
        .unwrap();
    fs::read(object).unwrap()
}
