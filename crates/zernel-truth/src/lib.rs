//! Scores detected phases against the labels that a program gives itself. Pure values: no I/O, no clock, no `unsafe`.
//!
//! | module | content |
//! |---|---|
//! | [`trace`] | the file that `zernel truth record` writes: events and phases of every observed thread |
//! | [`stamps`] | the logs that a program writes: its own labels |
//! | [`label`] | labels, and the phase, activity and class that each stands for |
//! | [`timeline`] | a value over time |
//! | [`detected_phases`] | what was detected, as timelines: recorded, or replayed through this version's tracker |
//! | [`score`] | confusion matrix, F1, shares, boundaries and delays of two timelines |
//! | [`gpu_busy`] | the reported utilization of the GPU, second by second |
//! | [`verdict`] | the verdict of the run's report |
//! | `warm_up` | the warm-up of a run, by the rules of this version |
//! | [`report`] | the score of a trace against its stamp logs |
//! | [`render`] | that score as text |
//! | [`score_limits`] | the least score that a trace must have |
#![forbid(unsafe_code)]

pub mod detected_phases;
pub mod gpu_busy;
pub mod label;
pub mod render;
pub mod report;
pub mod score;
pub mod score_limits;
pub mod stamps;
pub mod timeline;
pub mod trace;
pub mod verdict;
mod warm_up;
