//! The client against an agent that is played by a script: rightly, wrongly, and not at all.

mod fake_agent;
mod load;
mod save;
mod session;
