use super::*;

const MS: u64 = 1_000_000;

/// Returns consecutive steps with these durations in milliseconds.
fn steps_with_durations(milliseconds: impl IntoIterator<Item = u64>) -> Vec<Step> {
    let mut now_ns = 0;
    let step = |duration: u64| {
        let begin_ns = now_ns;
        now_ns += duration * MS;
        Step {
            begin_ns,
            end_ns: now_ns,
            launches: None,
            marks: [0, 1, 0, 0, 0, 0, 0],
            lacks_marks: false,
        }
    };
    milliseconds.into_iter().map(step).collect()
}

#[test]
fn periodic_long_steps_are_not_stalls() {
    let stalls = |period: u64, stalled: &[u64]| {
        let milliseconds = (1..=200).map(|number| match number {
            _ if stalled.contains(&number) => 120,
            _ if number % period == 0 => 50,
            _ => 10,
        });
        let steps = steps_with_durations(milliseconds);
        let summary = StepSummary::from_whole_run(&steps, StepMark::Backward).expect("steps");
        assert_eq!(summary.median_ns, 10 * MS);
        summary.stalls
    };
    // Every `period`th step is delayed, as by one slow loader of several.
    for period in [2, 3, 8] {
        assert_eq!(stalls(period, &[]), []);
        for stalled in [&[102][..], &[80, 90, 102]] {
            let durations: Vec<u64> = stalls(period, stalled)
                .iter()
                .map(|stall| stall.duration_ns)
                .collect();
            assert_eq!(durations, vec![120 * MS; stalled.len()]);
        }
    }
    // Without periodic long steps, three times the median is a stall.
    assert_eq!(stalls(201, &[101]).len(), 1);
}

#[test]
fn only_the_first_steps_of_a_run_are_warm_up() {
    let steps = steps_with_durations([50, 50].into_iter().chain([10; 40]));
    let summaries = [StepSummary::from_whole_run, StepSummary::from_later_steps]
        .map(|of| of(&steps, StepMark::Backward).unwrap());
    let key_numbers =
        |summary: &StepSummary| (summary.warm_up, summary.stalls.len(), summary.begin_ns);
    assert_eq!(
        summaries.each_ref().map(key_numbers),
        [(2, 0, 100 * MS), (0, 2, 0)]
    );
}

#[test]
fn one_of_few_steps_can_be_a_stall() {
    for count in 3..=12 {
        let steps =
            steps_with_durations((0..count).map(|number| if number == 1 { 50 } else { 10 }));
        let summary = StepSummary::from_whole_run(&steps, StepMark::Backward).expect("steps");
        assert_eq!(summary.stalls.len(), 1, "{count}");
    }
}
