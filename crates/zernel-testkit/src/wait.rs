//! Waits for conditions that soon hold on any machine. Every wait of a test uses this module: if the condition never
//! holds, the test fails after a minute and names the condition.

use std::fmt::Display;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of a wait for a condition. It is long enough for a loaded machine.
const CONDITION_TIME_LIMIT: Duration = Duration::from_secs(60);
/// The pause between two attempts starts at this length and doubles up to [`MAX_PAUSE`]. Quick conditions are seen
/// quickly, and conditions that start a process do not load the machine.
const MIN_PAUSE: Duration = Duration::from_millis(1);
const MAX_PAUSE: Duration = Duration::from_millis(50);

/// Waits until a condition holds. Panics after a minute, and names the condition.
pub fn eventually(what: &str, condition: impl FnMut() -> bool) {
    eventually_within(CONDITION_TIME_LIMIT, what, condition);
}

/// Waits until a condition holds, and panics after `limit`.
pub fn eventually_within(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let attempt = || condition().then_some(()).ok_or("the condition is false");
    retry::<_, &str>(limit, what, attempt);
}

/// Waits until an attempt succeeds, and returns its value. Panics after a minute with the last error.
pub fn eventually_ok<T, E: Display>(what: &str, attempt: impl FnMut() -> Result<T, E>) -> T {
    retry(CONDITION_TIME_LIMIT, what, attempt)
}

fn retry<T, E: Display>(
    limit: Duration,
    what: &str,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> T {
    let deadline = Instant::now() + limit;
    let mut pause = MIN_PAUSE;
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(error) if Instant::now() >= deadline => {
                panic!("not within {limit:?}: {what}: {error}")
            }
            Err(_) => thread::sleep(pause),
        }
        pause = MAX_PAUSE.min(2 * pause);
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn eventually_retries_until_condition_holds() {
        let mut attempts = 0;
        eventually("the third attempt", || {
            attempts += 1;
            attempts == 3
        });
        assert_eq!(attempts, 3);
    }

    #[test]
    fn eventually_ok_returns_value_of_success() {
        assert_eq!(eventually_ok("at once", || Ok::<_, Infallible>(7)), 7);
    }

    #[test]
    #[should_panic(expected = "not within 5ms: pigs fly: no wings")]
    fn retry_panics_with_name_and_last_error() {
        retry(Duration::from_millis(5), "pigs fly", || {
            Err::<(), _>("no wings")
        });
    }
}
