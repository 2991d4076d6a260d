//! `zernel-testjob CAUSE [SEED]`: runs one job and prints the median step time of each rank.

use std::process::ExitCode;

use zernel_testjob::{Bottleneck, Job, JobPart, JobPlan, run_job_process};

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    if let Some(code) = run_job_process() {
        return Ok(code.into());
    }
    let mut arguments = std::env::args().skip(1);
    let named = arguments.next().unwrap_or_default();
    let Some(cause) = Bottleneck::ALL
        .into_iter()
        .find(|cause| cause.name() == named)
    else {
        let names = Bottleneck::ALL.map(Bottleneck::name).join(", ");
        return Err(format!("give a cause, and a seed if you like; causes are {names}").into());
    };
    let seed = arguments.next().map_or(Ok(0), |seed| seed.parse())?;
    let job = Job::new(JobPlan::new(cause, seed))?;
    println!("{:#?}", job.plan());
    let status = job.job_command()?.status()?;
    for rank in 0..job.plan().ranks {
        let stamps = job.read_stamps(rank)?;
        let steps = stamps.iter().filter(|stamp| stamp.part == JobPart::Step);
        let mut times: Vec<u64> = steps.map(|stamp| stamp.end_ns - stamp.start_ns).collect();
        times.sort_unstable();
        let median = times
            .get(times.len() / 2)
            .map_or(0.0, |ns| *ns as f64 / 1e6);
        println!("rank {rank}: {} steps, median {median:.1} ms", times.len());
    }
    Ok(ExitCode::from(u8::from(!status.success())))
}
