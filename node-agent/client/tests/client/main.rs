//! The client against a scripted agent: valid, invalid and missing answers.

mod fake_agent;
mod keeper;
mod layers;
mod limits;
mod load;
mod matching;
mod memory;
mod paged;
mod queues;
mod reports;
mod save;
mod session;
mod transfers;
