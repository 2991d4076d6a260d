//! The three ways in which threads wait for the device, distinguished by how often the thread sleeps and yields.

mod support;

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use support::libraries::{CudaProgram, MILLISECOND_NS, assert_success, value_stored_by};
use support::run_in_fresh_process;

const SCHEDULE_SPIN: u32 = 1;
const SCHEDULE_YIELD: u32 = 2;
const SCHEDULE_BLOCKING_SYNC: u32 = 4;
const EVENT_BLOCKING_SYNC: u32 = 1;

/// The cost of a wait for the waiting thread, in counts that do not depend on the load of the machine.
#[derive(Debug, Clone, Copy)]
struct SleepsAndYields {
    /// How often the thread went to sleep.
    sleeps: i64,
    /// How often the thread yielded its CPU.
    yields: u64,
}

fn sleeps_and_yields_during(wait: impl FnOnce()) -> SleepsAndYields {
    let before = (voluntary_switches(), YIELD_COUNT.load(SeqCst));
    wait();
    SleepsAndYields {
        sleeps: voluntary_switches() - before.0,
        yields: YIELD_COUNT.load(SeqCst) - before.1,
    }
}

fn voluntary_switches() -> i64 {
    // SAFETY: the structure is plain data, which the call fills in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
        usage
    };
    usage.ru_nvcsw
}

static YIELD_COUNT: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_yield(_signal: i32) {
    YIELD_COUNT.fetch_add(1, SeqCst);
}

/// Makes every later `sched_yield` of this thread raise a SIGSYS. The handler of the signal counts them.
fn count_sched_yields() {
    let statement = |code: u32, value: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k: value,
    };
    let is_yield = libc::sock_filter {
        jf: 1,
        ..statement(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            libc::SYS_sched_yield as u32,
        )
    };
    let mut filter = [
        // The first word of what a seccomp filter reads is the number of the system call.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        is_yield,
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_TRAP),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the handler only touches an atomic; the filter is copied by the kernel during the call.
    unsafe {
        let handler = count_yield as extern "C" fn(i32) as libc::sighandler_t;
        assert_ne!(libc::signal(libc::SIGSYS, handler), libc::SIG_ERR);
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program),
            0
        );
    }
}

#[test]
fn context_flags_select_spin_yield_or_block_wait() {
    run_in_fresh_process("context_flags_select_spin_yield_or_block_wait", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        count_sched_yields();
        let wait_in = |flags| {
            let context = value_stored_by(|context| (cuda.cuCtxCreate_v2)(context, flags, 0));
            program.launch(0, 50 * MILLISECOND_NS);
            let cost = sleeps_and_yields_during(|| assert_success((cuda.cuStreamSynchronize)(0)));
            assert_success((cuda.cuStreamQuery)(0));
            assert_success((cuda.cuCtxDestroy_v2)(context));
            cost
        };
        let (spinning, yielding, blocking) = (
            wait_in(SCHEDULE_SPIN),
            wait_in(SCHEDULE_YIELD),
            wait_in(SCHEDULE_BLOCKING_SYNC),
        );
        assert!(spinning.sleeps == 0 && spinning.yields == 0, "{spinning:?}");
        assert!(yielding.sleeps == 0 && yielding.yields > 10, "{yielding:?}");
        assert!(blocking.sleeps >= 1 && blocking.yields == 0, "{blocking:?}");
    });
}

#[test]
fn blocking_sync_event_blocks_in_spinning_context() {
    run_in_fresh_process("blocking_sync_event_blocks_in_spinning_context", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let wait_for = |flags| {
            let event = program.create_event(flags);
            program.launch(0, 50 * MILLISECOND_NS);
            assert_success((cuda.cuEventRecord)(event, 0));
            sleeps_and_yields_during(|| assert_success((cuda.cuEventSynchronize)(event)))
        };
        assert_eq!(wait_for(0).sleeps, 0);
        assert!(wait_for(EVENT_BLOCKING_SYNC).sleeps >= 1);
    });
}

#[test]
fn primary_context_waits_by_its_latest_flags() {
    run_in_fresh_process("primary_context_waits_by_its_latest_flags", || {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let stream = program.create_stream();
        for (flags, blocks) in [
            (SCHEDULE_BLOCKING_SYNC, true),
            (SCHEDULE_SPIN, false),
            (SCHEDULE_BLOCKING_SYNC, true),
        ] {
            assert_success((cuda.cuDevicePrimaryCtxSetFlags_v2)(0, flags));
            program.launch(stream, 30 * MILLISECOND_NS);
            let cost = sleeps_and_yields_during(|| assert_success((cuda.cuCtxSynchronize)()));
            assert_eq!(cost.sleeps > 0, blocks, "flags {flags}: {cost:?}");
        }
        assert_eq!(
            (cuda.cuDevicePrimaryCtxSetFlags_v2)(0, SCHEDULE_SPIN | SCHEDULE_BLOCKING_SYNC),
            1
        );
    });
}
