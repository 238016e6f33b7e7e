//! The output of a failing test, in this order: where the whole logs are, the end of each log, and the test's
//! error.
//!
//! The panic message is printed before the logs, since these are printed while the test unwinds. A hook
//! stores the message of each thread, so that it can be repeated after the logs. The logs are in a folder
//! that is removed with the test, so they are copied to `$REPRISE_CACHE/failed/TEST`.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;
use std::sync::Once;

use reprise_testkit::cluster::cache_directory;

use crate::logs::Logs;
use crate::seed::print_line;

thread_local! {
    /// Message and location of the last panic of this thread.
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Installs a hook that stores panic messages.
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

/// Prints the ends of the logs of a test that has panicked, and then its error.
pub(crate) fn print(test: &str, logs: &Logs) {
    let error = MESSAGE.with_borrow(|message| message.clone().unwrap_or_default());
    print_line(&text(test, &logs.tails(), &keep_logs(test, logs), &error));
}

/// Returns the name of the test that runs in this thread.
pub(crate) fn test() -> String {
    std::thread::current().name().unwrap_or("test").to_owned()
}

/// Copies the logs to a permanent folder and returns its path.
fn keep_logs(test: &str, logs: &Logs) -> Result<PathBuf, std::io::Error> {
    let name: String = test.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let folder = cache_directory().join("failed").join(name);
    // Left by an earlier failure.
    drop(fs::remove_dir_all(&folder));
    fs::create_dir_all(&folder)?;
    for (number, file) in logs.files().iter().enumerate().filter(|(_, file)| file.exists()) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        fs::copy(file, folder.join(format!("{number}-{name}")))?;
    }
    Ok(folder)
}

fn text(test: &str, tails: &str, kept: &Result<PathBuf, std::io::Error>, error: &str) -> String {
    let location = match kept {
        Ok(folder) => format!("the whole logs are in {}", folder.display()),
        Err(error) => format!("cannot keep the whole logs: {error}"),
    };
    format!("{test} failed; {location}\n{tails}[e2e] {test} failed:\n{error}")
}
