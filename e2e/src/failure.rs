//! What a failing test prints, in this order: where the whole logs are, the end of each log, and last the error of the test itself.
//!
//! The panic message comes before the logs, since these are printed while the test unwinds. A hook remembers the message of each thread, so that it can
//! be repeated behind them. The logs lie in a folder that is removed with the test, so they are copied to `$REPRISE_CACHE/failed/TEST`.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;
use std::sync::Once;

use crate::logs::Logs;
use crate::seed::say;
use crate::world::cache;

thread_local! {
    /// Message of the last panic of this thread, with its place.
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Remembers messages of panics from now on.
pub(crate) fn remember_panics() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            MESSAGE.with_borrow_mut(|message| *message = Some(panic.to_string()));
            before(panic);
        }));
    });
}

/// Prints the ends of the logs of a test that has panicked, and its error behind them.
pub(crate) fn print(test: &str, logs: &Logs) {
    let error = MESSAGE.with_borrow(|message| message.clone().unwrap_or_default());
    say(&text(test, &logs.tails(), &kept(test, logs), &error));
}

/// Name of the test that runs in this thread.
pub(crate) fn test() -> String {
    std::thread::current().name().unwrap_or("test").to_owned()
}

/// Copies the logs to where they stay. Returns that folder, or why there is none.
fn kept(test: &str, logs: &Logs) -> Result<PathBuf, std::io::Error> {
    let name: String = test.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let folder = cache().join("failed").join(name);
    // Of an earlier failure.
    drop(fs::remove_dir_all(&folder));
    fs::create_dir_all(&folder)?;
    for (number, file) in logs.files().iter().enumerate().filter(|(_, file)| file.exists()) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        fs::copy(file, folder.join(format!("{number}-{name}")))?;
    }
    Ok(folder)
}

fn text(test: &str, tails: &str, kept: &Result<PathBuf, std::io::Error>, error: &str) -> String {
    let whole = match kept {
        Ok(folder) => format!("the whole logs are in {}", folder.display()),
        Err(error) => format!("cannot keep the whole logs: {error}"),
    };
    format!("{test} has failed; {whole}\n{tails}[e2e] {test} has failed:\n{error}")
}
