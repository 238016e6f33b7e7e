//! Logs of the processes of a test. At its end, they must contain no warning or error that the test has not
//! allowed.
//!
//! Each warning or error of a product calls for action. A test that provokes one names words of it; any other
//! one fails the test, even if all assertions hold.

use std::path::PathBuf;

pub use reprise_testkit::process::read_log as read;

/// Texts that mark warnings, errors and panics in the text format of `tracing`.
const BAD: [&str; 3] = [" WARN ", " ERROR ", "panicked at"];

/// Warning of a process without certificates. Most tests use plain connections, within one machine.
pub const PLAIN: &str = "connections are plain";

/// Number of lines of each log that are printed when a test fails.
const TAIL_LINES: usize = 20;

/// Log files, and the lines that are allowed or required in them.
#[derive(Debug, Default)]
pub struct Logs {
    files: Vec<PathBuf>,
    allowed: Vec<String>,
    required: Vec<String>,
}

impl Logs {
    /// Adds the log file of a process.
    pub fn add(&mut self, file: PathBuf) {
        if !self.files.contains(&file) {
            self.files.push(file);
        }
    }

    /// Returns the added log files.
    pub(crate) fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Allows warnings and errors that contain these words.
    pub fn allow(&mut self, words: &str) {
        self.allowed.push(words.to_owned());
    }

    /// Requires a line with these words, which may be a warning or error.
    pub fn require(&mut self, words: &str) {
        self.required.push(words.to_owned());
    }

    /// Returns the unexpected warnings and errors, and the required words that no line contains.
    pub fn violations(&self) -> Vec<String> {
        let texts: Vec<String> = self.files.iter().map(|file| read(file)).collect();
        let named = |line: &str| {
            line.contains(PLAIN)
                || self.allowed.iter().chain(&self.required).any(|words| line.contains(words))
        };
        let bad = |line: &&str| BAD.iter().any(|mark| line.contains(mark)) && !named(line);
        let lines = texts.iter().flat_map(|text| text.lines());
        let unexpected = lines.filter(bad).map(|line| format!("unexpected: {line}"));
        let missing = self.required.iter().filter(|words| !texts.iter().any(|text| text.contains(*words)));
        unexpected.chain(missing.map(|words| format!("never logged: {words}"))).collect()
    }

    /// Returns the ends of all logs, for the output of a failing test.
    pub fn tails(&self) -> String {
        let tail = |file: &PathBuf| {
            let text = read(file);
            let lines: Vec<&str> = text.lines().collect();
            let from = lines.len().saturating_sub(TAIL_LINES);
            format!("---- end of {}\n{}\n", file.display(), lines[from..].join("\n"))
        };
        self.files.iter().map(tail).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn logs(text: &str) -> (tempfile::TempDir, Logs) {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("log");
        fs::write(&file, text).expect("written");
        let mut logs = Logs::default();
        logs.add(file);
        (directory, logs)
    }

    #[test]
    fn reports_a_warning_that_is_not_allowed() {
        let (_kept, mut logs) = logs("t  INFO a: fine\nt  WARN b: disk slow\n");
        assert_eq!(logs.violations().len(), 1);
        logs.allow("disk slow");
        assert!(logs.violations().is_empty());
    }

    #[test]
    fn reports_a_required_line_that_is_missing() {
        let (_kept, mut logs) = logs("t ERROR a: it broke\n");
        logs.require("it broke");
        assert!(logs.violations().is_empty());
        logs.require("it was repaired");
        assert_eq!(logs.violations(), ["never logged: it was repaired"]);
    }

    #[test]
    fn reports_a_panic() {
        let (_kept, logs) = logs("thread 'core' panicked at src/x.rs:1:1:\n");
        assert_eq!(logs.violations().len(), 1);
    }
}
