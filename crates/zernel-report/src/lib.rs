//! The report on a run: what was recorded of its processes, what bounds it, and how that is shown.
//!
//! | module | subject |
//! |---|---|
//! | `record`, `steps` | what was observed of one process over time |
//! | `process` | the totals of one process |
//! | `parts` | the time of a rank, in parts that do not overlap |
//! | `verdict` | what bounds the run |
//! | `report` | all of it as data, serialised as JSON |
//! | `render`, `html` | the report as text and as a page |
//! | [`text`] | sizes, times and line breaks, for every command that prints |

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
