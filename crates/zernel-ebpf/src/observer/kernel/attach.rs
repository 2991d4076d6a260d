//! Attaches the BPF programs to functions of a file, by the kind of uprobe that this kernel supports.

use std::path::Path;

use libbpf_rs::{Link, UprobeMultiOpts, UprobeOpts};

use super::{KernelPrograms, ProbeTarget, UprobeKind};
use crate::child_task::TakeLink;
use crate::probes::SYMBOLS;

impl KernelPrograms {
    /// Attaches probes to functions of one file. Dropping the links detaches the probes.
    pub(crate) fn attach_probes(
        &self,
        file: &Path,
        targets: &[ProbeTarget],
    ) -> libbpf_rs::Result<Vec<Link>> {
        let mut links = Vec::new();
        self.attach_and_pass_links(file, targets, &mut |link| {
            links.push(link);
            Ok(())
        })?;
        Ok(links)
    }

    /// Attaches probes to functions of one file, and passes each link on as soon as there is one.
    pub(crate) fn attach_and_pass_links(
        &self,
        file: &Path,
        targets: &[ProbeTarget],
        take: TakeLink<'_>,
    ) -> libbpf_rs::Result<()> {
        let (markers, calls): (Vec<ProbeTarget>, Vec<ProbeTarget>) = targets
            .iter()
            .partition(|target| SYMBOLS[target.symbol].is_entry_only);
        if !calls.is_empty() {
            self.attach_entries_and_returns(file, &calls, take)?;
        }
        if !markers.is_empty() {
            self.attach_entries_only(file, &markers, take)?;
        }
        Ok(())
    }

    fn attach_entries_and_returns(
        &self,
        file: &Path,
        targets: &[ProbeTarget],
        take: TakeLink<'_>,
    ) -> libbpf_rs::Result<()> {
        match self.rung {
            UprobeKind::Session => {
                take(self.attach_multi("call_session", file, targets, false)?)?;
            }
            // Probes on returns are attached first: a return without its entry is ignored, but an entry without its
            // return is a call that never ends.
            UprobeKind::Multi => {
                take(self.attach_multi("call_leave_multi", file, targets, true)?)?;
                take(self.attach_multi("call_enter_multi", file, targets, false)?)?;
            }
            UprobeKind::PerfEvent => {
                for target in targets {
                    take(self.attach_perf("call_leave_perf", file, target, true)?)?;
                    take(self.attach_perf("call_enter_perf", file, target, false)?)?;
                }
            }
        }
        Ok(())
    }

    /// Attaches probes to the entries of functions only, with one link for each set of functions.
    fn attach_entries_only(
        &self,
        file: &Path,
        targets: &[ProbeTarget],
        take: TakeLink<'_>,
    ) -> libbpf_rs::Result<()> {
        match self.rung {
            UprobeKind::Session | UprobeKind::Multi => {
                take(self.attach_multi("call_mark_multi", file, targets, false)?)?;
            }
            UprobeKind::PerfEvent => {
                for target in targets {
                    take(self.attach_perf("call_mark_perf", file, target, false)?)?;
                }
            }
        }
        Ok(())
    }

    fn attach_multi(
        &self,
        program: &str,
        file: &Path,
        targets: &[ProbeTarget],
        retprobe: bool,
    ) -> libbpf_rs::Result<Link> {
        let options = UprobeMultiOpts {
            offsets: targets
                .iter()
                .map(|target| target.offset as usize)
                .collect(),
            cookies: targets.iter().map(|target| target.symbol as u64).collect(),
            session: program == "call_session",
            retprobe,
            ..Default::default()
        };
        self.find_program_by_name(program)?
            .attach_uprobe_multi_with_opts(-1, file, "", options)
    }

    fn attach_perf(
        &self,
        program: &str,
        file: &Path,
        target: &ProbeTarget,
        retprobe: bool,
    ) -> libbpf_rs::Result<Link> {
        let options = UprobeOpts {
            cookie: target.symbol as u64,
            retprobe,
            ..Default::default()
        };
        self.find_program_by_name(program)?.attach_uprobe_with_opts(
            -1,
            file,
            target.offset as usize,
            options,
        )
    }
}
