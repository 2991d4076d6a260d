//! Records the processes of a run, judges what bounds it, and renders the report as text, JSON or HTML.
//!
//! | module | subject |
//! |---|---|
//! | `record`, `steps` | samples and steps of one process over time |
//! | `process` | totals of one process |
//! | `parts` | a rank's time, split into parts that do not overlap |
//! | `verdict` | what bounds the run |
//! | `report` | the whole report as data; its JSON form |
//! | `render`, `html` | the report as text and as an HTML page |
//! | [`text`] | formatting of sizes, times and lines, for every command |

mod html;
mod parts;
mod process;
mod record;
mod render;
mod report;
mod steps;
pub mod text;
mod verdict;

pub use html::html;
pub use process::ProcessReport;
pub use record::Record;
pub use render::text as render_text;
pub use report::{Ended, Observation, Report};
