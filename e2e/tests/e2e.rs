//! End-to-end tests with the standard harness: processes on one machine, the operator, the chart, the command line.
//!
//! All are one test program, since linking a program takes as long as running its tests.

mod chart;
mod cli;
mod devices;
mod images;
mod metrics;
mod operator;
mod processes;
