//! The client against an agent that is played by a script: rightly, wrongly, and not at all.

mod fake_agent;
mod keeper;
mod layers;
mod load;
mod matching;
mod memory;
mod paged;
mod save;
mod session;
mod transfers;
