"use strict";
// Lets the search work on pages that are opened as files. Browsers refuse to start a worker from a
// file, so this stand-in runs the worker's script in a hidden frame. On a server it does nothing.

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    this.inside = this.frame.contentWindow;
    const page = this.inside.document;
    page.open();
    page.write("<!doctype html><body></body>");
    page.close();
    this.inside.postMessage = (data) => this.receive(data);
    this.ready = new Promise((resolve) => {
      const script = page.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => this.onerror?.(new ErrorEvent("error", { filename: url }));
      page.body.append(script);
    });
  }

  receive(data) {
    const event = new MessageEvent("message", { data });
    this.dispatchEvent(event);
    this.onmessage?.(event);
  }

  postMessage(data) {
    this.ready.then(() => {
      this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
    });
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
