//! Scores detected phases against the labels that a program gives itself. Pure values: no I/O, no clock, no `unsafe`.
//!
//! | module | content |
//! |---|---|
//! | [`trace`] | the file that `zernel truth record` writes: events and phases of every observed thread |
#![forbid(unsafe_code)]

pub mod trace;
