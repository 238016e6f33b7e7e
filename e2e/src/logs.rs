//! Logs of the processes of a test: at its end they must hold nothing bad that the test did not name.
//!
//! A warning or error of a product is a promise that somebody has to look. A test that provokes one says so by naming
//! words of it; any other one fails the test, even if all it asserts is true.

use std::fs;
use std::path::{Path, PathBuf};

/// Marks of lines that somebody has to look at, as the text format of `tracing` has them.
const BAD: [&str; 3] = [" WARN ", " ERROR ", "panicked at"];

/// Lines of each log that are printed when a test fails.
const TAIL_LINES: usize = 20;

/// Logs, and which of their bad lines are as they should be.
#[derive(Debug, Default)]
pub struct Logs {
    files: Vec<PathBuf>,
    allowed: Vec<String>,
    required: Vec<String>,
}

impl Logs {
    /// A process logs there from now on.
    pub fn add(&mut self, file: PathBuf) {
        if !self.files.contains(&file) {
            self.files.push(file);
        }
    }

    /// Files that processes log to.
    pub(crate) fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Bad lines with these words may occur.
    pub fn allow(&mut self, words: &str) {
        self.allowed.push(words.to_owned());
    }

    /// A line with these words must occur; it may be a bad one.
    pub fn require(&mut self, words: &str) {
        self.required.push(words.to_owned());
    }

    /// What is wrong with the logs: unexpected bad lines, and expected lines that are missing.
    pub fn complaints(&self) -> Vec<String> {
        let texts: Vec<String> = self.files.iter().map(|file| read(file)).collect();
        let named = |line: &str| self.allowed.iter().chain(&self.required).any(|words| line.contains(words));
        let bad = |line: &&str| BAD.iter().any(|mark| line.contains(mark)) && !named(line);
        let lines = texts.iter().flat_map(|text| text.lines());
        let unexpected = lines.filter(bad).map(|line| format!("unexpected: {line}"));
        let missing = self.required.iter().filter(|words| !texts.iter().any(|text| text.contains(*words)));
        unexpected.chain(missing.map(|words| format!("never logged: {words}"))).collect()
    }

    /// The ends of all logs, for whoever looks at a failure.
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

/// All that a process has logged; nothing when it has not started.
pub fn read(file: &Path) -> String {
    fs::read(file).map_or(String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
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
    fn a_warning_that_nobody_named_is_a_complaint() {
        let (_kept, mut logs) = logs("t  INFO a: fine\nt  WARN b: disk slow\n");
        assert_eq!(logs.complaints().len(), 1);
        logs.allow("disk slow");
        assert!(logs.complaints().is_empty());
    }

    #[test]
    fn a_line_that_must_occur_and_does_not_is_a_complaint() {
        let (_kept, mut logs) = logs("t ERROR a: it broke\n");
        logs.require("it broke");
        assert!(logs.complaints().is_empty());
        logs.require("it was repaired");
        assert_eq!(logs.complaints(), ["never logged: it was repaired"]);
    }

    #[test]
    fn a_panic_is_a_complaint() {
        let (_kept, logs) = logs("thread 'core' panicked at src/x.rs:1:1:\n");
        assert_eq!(logs.complaints().len(), 1);
    }
}
