//! Records the processes of a run, judges what bounds it, and renders the report as text, JSON or HTML.
//!
//! | module | subject |
//! |---|---|
//! | `record`, `steps` | samples and steps of one process over time |
//! | `process`, `phases` | totals of one process |
//! | `times` | the times of a process, the figures of a rank that the verdict uses, and their split into parts |
//! | `verdict` | what bounds the run |
//! | `judge_written_report` | the verdict of this version on a report that was written earlier |
//! | `report` | the whole report as data; its JSON form |
//! | `render`, `html` | the report as text and as an HTML page |
//! | [`text`] | formatting of sizes, times and lines, for every command |

mod html;
mod judge_written_report;
mod phases;
mod process;
mod record;
mod render;
mod report;
mod steps;
pub mod text;
mod times;
mod verdict;

pub use html::render_html;
pub use judge_written_report::judge_written_report;
pub use process::ProcessReport;
pub use record::ProcessRecord;
pub use render::render_text;
pub use report::{CommandExit, Observation, Report};
