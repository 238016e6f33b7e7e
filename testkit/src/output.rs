//! Output of the command line: tables and progress bars, or one JSON object per line with `--json`.

// This module is where printing happens; everywhere else it is a lint error.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::io::IsTerminal;

use serde::Serialize;

/// Reader of the output, which determines its form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// A person: tables and text.
    Person,
    /// A program: one JSON object a line.
    Program,
}

impl Audience {
    /// Returns [`Audience::Program`] if `--json` was given.
    pub fn of(json: JsonFlag) -> Audience {
        if json.0 { Audience::Program } else { Audience::Person }
    }

    /// Prints a line of text; nothing with `--json`.
    pub fn print_line(self, line: impl AsRef<str>) {
        if self == Audience::Person {
            println!("{}", line.as_ref());
        }
    }

    /// Prints an object as one line of JSON; nothing without `--json`.
    pub fn emit(self, object: &impl Serialize) {
        if self == Audience::Program {
            println!("{}", serde_json::to_string(object).expect("our own types encode as JSON"));
        }
    }

    /// Returns a progress bar; it is hidden with `--json` and unless standard error is a terminal.
    pub fn progress(self, length: u64, label: &'static str) -> indicatif::ProgressBar {
        if self == Audience::Program || !std::io::stderr().is_terminal() {
            return indicatif::ProgressBar::hidden();
        }
        let style = indicatif::ProgressStyle::with_template("{prefix} {bar:32} {pos}/{len} {elapsed}\n{msg}")
            .expect("the template is well formed");
        indicatif::ProgressBar::new(length).with_style(style).with_prefix(label)
    }
}

/// Prints text without a trailing newline.
pub fn print(text: &str) {
    print!("{text}");
}

/// Value of the flag `--json`.
#[derive(Clone, Copy, Debug)]
pub struct JsonFlag(pub bool);

/// A text table; the first column is left-aligned, the others right-aligned.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with a heading.
    pub fn new(heading: &[&str]) -> Table {
        Table { rows: vec![heading.iter().map(|cell| (*cell).to_owned()).collect()] }
    }

    /// Adds a row of cells below the others.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Returns the table as text, one line per row.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            for (column, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[column] - cell.chars().count());
                match column {
                    0 => text.extend([cell.as_str(), pad.as_str()]),
                    _ => text.extend(["  ", pad.as_str(), cell.as_str()]),
                }
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text
    }
}

/// Formats a number of bytes with a binary unit, and one decimal below 100 units.
pub fn bytes_text(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 100.0 {
        format!("{value:.0} {}", units[unit])
    } else {
        format!("{value:.1} {}", units[unit])
    }
}

/// Formats transferred bytes and their rate, such as `1.5 GiB at 512 MiB/s`; without a duration, only the
/// bytes.
pub fn transfer_text(bytes: u64, seconds: f64) -> String {
    let mut text = bytes_text(bytes);
    if seconds > 0.0 {
        let rate = (bytes as f64 / seconds) as u64;
        text.push_str(&format!(" at {}/s", bytes_text(rate)));
    }
    text
}

/// Formats a latency in microseconds, from 1 ms on in milliseconds.
pub fn latency_text(microseconds: u64) -> String {
    if microseconds < 1000 {
        format!("{microseconds} µs")
    } else {
        format!("{:.1} ms", microseconds as f64 / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_aligns_its_columns() {
        let mut table = Table::new(&["tier", "blocks"]);
        table.row(vec!["own DRAM".into(), "7".into()]);
        assert_eq!(table.render(), "tier      blocks\nown DRAM       7\n");
    }

    #[test]
    fn formats_bytes_with_a_fitting_unit() {
        assert_eq!(bytes_text(512), "512 B");
        assert_eq!(bytes_text(64 << 10), "64.0 KiB");
        assert_eq!(bytes_text(3 << 30), "3.0 GiB");
    }

    #[test]
    fn formats_a_transfer_with_its_rate_if_the_duration_is_known() {
        assert_eq!(transfer_text(3 << 30, 2.0), "3.0 GiB at 1.5 GiB/s");
        assert_eq!(transfer_text(0, 0.0), "0 B");
    }

    #[test]
    fn formats_latencies_from_one_millisecond_on_in_milliseconds() {
        assert_eq!(latency_text(999), "999 µs");
        assert_eq!(latency_text(12_343), "12.3 ms");
    }
}
